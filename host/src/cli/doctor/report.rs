//! How the doctor's findings are written: for people and as JSON.

use serde_json::{Value, json};

use mlxcel_abi::version::{ABI_MAJOR, ABI_MINOR};

use super::super::args::VERSION;
use super::super::table::{bytes_text, counted};
use super::findings::{Findings, Folder, Place, Tried};

/// What is wrong and what to do, most important first.
fn advice(findings: &Findings) -> Vec<(String, String)> {
    let mut advice = Vec::new();
    let searched = "see the places above; name a folder with --plugins-dir or MLXCEL_PLUGIN_PATH, or build the plugins \
                    that come with mlxcel";
    for (has, found, kind) in [
        (
            findings.has_backend(),
            findings.backends.is_empty(),
            "backend",
        ),
        (
            findings.has_family(),
            findings.families.is_empty(),
            "family",
        ),
    ] {
        if has {
            continue;
        }
        match found {
            true => advice.push((format!("no {kind} plugin was found"), searched.to_owned())),
            false => advice.push((
                format!("no {kind} plugin can be used"),
                "the lines above that begin with `bad` say why and what to do".to_owned(),
            )),
        }
    }
    for text in findings.places.iter().flat_map(|place| &place.unread) {
        let remedy = "let this user read it, or remove it from the plugin folder";
        advice.push((text.clone(), remedy.to_owned()));
    }
    for (what, folder, variable) in [
        ("cache", &findings.cache, "MLXCEL_CACHE_DIR"),
        ("model store", &findings.store, "MLXCEL_MODELS_DIR"),
    ] {
        if let Some(problem) = &folder.problem {
            advice.push((
                format!("{what}: {problem}"),
                format!("choose another folder with {variable}"),
            ));
        }
    }
    advice
}

fn tried_value(tried: &Tried) -> Value {
    let mut value = json!({
        "name": tried.name,
        "version": tried.version,
        "path": tried.path.to_string_lossy(),
        "usable": tried.is_usable(),
        "left_out": tried.is_left_out,
        "reason": Value::Null,
    });
    let Some(object) = value.as_object_mut() else {
        return value;
    };
    match &tried.outcome {
        Ok(Some(report)) => {
            object.insert("reason".to_owned(), json!(report.reason));
            object.insert("score".to_owned(), json!(report.score));
            object.insert("devices".to_owned(), json!(report.devices));
            object.insert("details".to_owned(), json!(report.details));
        }
        Ok(None) => {
            object.insert("archs".to_owned(), json!(tried.archs));
        }
        Err(reason) => {
            object.insert("reason".to_owned(), json!(reason));
        }
    }
    value
}

fn folder_value(folder: &Folder) -> Value {
    json!({
        "path": folder.path.as_ref().map(|path| path.to_string_lossy()),
        "writable": folder.problem.is_none(),
        "problem": folder.problem,
    })
}

fn place_value(place: &Place) -> Value {
    json!({
        "tier": place.tier.name(),
        "path": place.path.to_string_lossy(),
        "plugins": place.plugins,
        "problem": place.problem,
        "unread": place.unread,
    })
}

/// The report as JSON.
pub(super) fn document(findings: &Findings) -> Value {
    let list = |tried: &[Tried]| tried.iter().map(tried_value).collect::<Vec<Value>>();
    let others = findings
        .others
        .iter()
        .map(|(path, reason)| json!({"path": path.to_string_lossy(), "reason": reason}));
    let problems = advice(findings)
        .into_iter()
        .map(|(problem, remedy)| json!({"problem": problem, "remedy": remedy}));
    json!({
        "mlxcel_version": VERSION,
        "abi": { "major": ABI_MAJOR, "minor": ABI_MINOR },
        "platform": { "os": std::env::consts::OS, "arch": std::env::consts::ARCH },
        "ready": findings.is_ready(),
        "places": findings.places.iter().map(place_value).collect::<Vec<Value>>(),
        "families": list(&findings.families),
        "backends": list(&findings.backends),
        "auto_backend": findings.best_backend(),
        "other_files": others.collect::<Vec<Value>>(),
        "memory": {
            "total_bytes": findings.memory.total_bytes,
            "available_bytes": findings.memory.available_bytes,
            "budget_bytes": findings.budget.bytes,
            "budget_origin": findings.budget.origin,
        },
        "cache": folder_value(&findings.cache),
        "store": folder_value(&findings.store),
        "endpoint": {
            "url": findings.endpoint,
            "offline": findings.offline,
            "has_token": findings.has_token,
        },
        "problems": problems.collect::<Vec<Value>>(),
    })
}

/// The report for people.
pub(super) fn text(findings: &Findings) -> String {
    let mut lines = vec![format!(
        "mlxcel {VERSION}, plugin ABI {ABI_MAJOR}.{ABI_MINOR}, {} {}",
        std::env::consts::OS,
        std::env::consts::ARCH
    )];
    lines.push("plugin places".to_owned());
    lines.extend(findings.places.iter().flat_map(place_lines));
    lines.push("families".to_owned());
    lines.extend(tried_lines(&findings.families));
    lines.push("backends".to_owned());
    lines.extend(tried_lines(&findings.backends));
    if !findings.others.is_empty() {
        lines.push("other files".to_owned());
        lines.extend(
            findings
                .others
                .iter()
                .map(|(path, reason)| format!("  {}: {reason}", path.display())),
        );
    }
    let amount = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".to_owned(), bytes_text);
    lines.push(format!(
        "memory        {} of {} available; budget {} ({})",
        amount(findings.memory.available_bytes),
        amount(findings.memory.total_bytes),
        amount(findings.budget.bytes),
        findings.budget.origin
    ));
    lines.push(format!("cache         {}", folder_line(&findings.cache)));
    lines.push(format!("model store   {}", folder_line(&findings.store)));
    let token = if findings.has_token {
        "with a token"
    } else {
        "no token"
    };
    let offline = findings
        .offline
        .map(|variable| format!(", offline by {variable}"))
        .unwrap_or_default();
    lines.push(format!(
        "endpoint      {}, {token}{offline}",
        findings.endpoint
    ));
    for (problem, remedy) in advice(findings) {
        lines.push(format!("problem       {problem}"));
        lines.push(format!("              {remedy}"));
    }
    lines.push(match (findings.is_ready(), findings.best_backend()) {
        (true, Some(backend)) => format!("ready         models will run on {backend}"),
        _ => "not ready     no model can be run before the problems above are solved".to_owned(),
    });
    lines.iter().map(|line| format!("{line}\n")).collect()
}

fn place_lines(place: &Place) -> Vec<String> {
    let found = place
        .problem
        .clone()
        .unwrap_or_else(|| counted(place.plugins, "plugin"));
    let tier = place.tier.name();
    let mut lines = vec![format!("  {tier:<10} {}: {found}", place.path.display())];
    let unread = place.unread.iter();
    lines.extend(unread.map(|text| format!("  {:<10} {text}", "")));
    lines
}

fn tried_lines(tried: &[Tried]) -> Vec<String> {
    if tried.is_empty() {
        return vec!["  none found".to_owned()];
    }
    tried
        .iter()
        .map(|tried| {
            let mark = match (tried.is_usable(), tried.is_left_out) {
                (true, _) => "ok ",
                (false, true) => "-  ",
                (false, false) => "bad",
            };
            let words = match &tried.outcome {
                Ok(Some(report)) => {
                    let devices: Vec<&str> = report
                        .devices
                        .iter()
                        .map(|device| device.description.as_str())
                        .collect();
                    let devices = match devices.is_empty() {
                        true => String::new(),
                        false => format!("; devices: {}", devices.join(", ")),
                    };
                    format!("score {}, {}{devices}", report.score, report.reason)
                }
                Ok(None) => counted(tried.archs, "architecture"),
                Err(reason) => format!("{}: {reason}", tried.path.display()),
            };
            let name = [tried.name.as_str(), tried.version.as_str()].join(" ");
            format!("  {mark} {}: {words}", name.trim_end())
        })
        .collect()
}

fn folder_line(folder: &Folder) -> String {
    let path = folder
        .path
        .as_ref()
        .map_or_else(|| "none".to_owned(), |path| path.display().to_string());
    match &folder.problem {
        None => format!("{path} (writable)"),
        Some(problem) => format!("{path}: {problem}"),
    }
}
