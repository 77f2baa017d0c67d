//! `run.sh` as it is, with programs in the others' places that write down how they were started.
#![cfg(target_os = "linux")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::{SCRIPTS, VERSION};

const USABLE: &str = r#"{"mlxcel_version": "0.1.0", "backends": [{"name": "cuda", "path": "PLUGINS/mlxcel-backend-cuda/libx.so",
    "usable": true, "reason": "", "devices": [{"name": "cuda:0", "description": "NVIDIA H200, compute capability 9.0"}, {"name": "cuda:1"}],
    "details": {"alone": [{"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "7"}]}}]}"#;
const UNUSABLE: &str = r#"{"mlxcel_version": "0.1.0", "backends": [{"name": "cpu", "path": "/x", "usable": true, "reason": "", "devices": []},
    {"name": "cuda", "path": "PLUGINS/mlxcel-backend-cuda/libx.so", "usable": false, "reason": "there is no driver", "devices": []}]}"#;
const ELSEWHERE: &str = r#"{"mlxcel_version": "0.1.0", "backends": [{"name": "cuda", "path": "/usr/lib/mlxcel/plugins/libx.so",
    "usable": true, "reason": "", "devices": []}]}"#;

const MLXCEL: &str = r#"#!/bin/sh
echo "mlxcel $* devices=${CUDA_VISIBLE_DEVICES-} path=${MLXCEL_PLUGIN_PATH-}" >>"$LOG"
case "$*" in
doctor*--json*) cat "$0.json" ;;
bench*) echo '{"device": "NVIDIA H200", "results": [{"test": "tg128", "tokens_per_second": 600.5, "deviation": 1.0}]}' ;;
esac
"#;
const WRITES_DOWN: &str = r#"
import os, sys
name = os.path.basename(sys.argv[0])
with open(os.environ["LOG"], "a") as log:
    log.write(f"{name} {' '.join(sys.argv[1:])}\n")
sys.exit(1 if name == os.environ.get("FAILS") else 0)
"#;

/// A bundle with stand-ins, and a folder with what looks like checkpoints.
struct Bundle {
    home: PathBuf,
}

impl Bundle {
    fn new(name: &str, doctor: &str) -> Self {
        let home =
            std::env::temp_dir().join(format!("xtask-bench-cuda-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&home);
        let plugins = home.join("bundle/lib/mlxcel/plugins");
        for folder in ["mlxcel-backend-cuda", "mlxcel-family-llama"] {
            fs::create_dir_all(plugins.join(folder)).expect("created");
        }
        let is_real = |name: &str| matches!(name, "run.sh" | "machine.py" | "table.py");
        for (name, text) in SCRIPTS {
            let text = if is_real(name) { text } else { WRITES_DOWN };
            fs::write(home.join("bundle").join(name), text).expect("written");
        }
        fs::write(home.join("bundle").join(VERSION), "0123456789ab\n").expect("written");
        let mlxcel = home.join("bundle/bin/mlxcel");
        fs::create_dir_all(home.join("bundle/bin")).expect("created");
        fs::write(&mlxcel, MLXCEL).expect("written");
        fs::set_permissions(&mlxcel, fs::Permissions::from_mode(0o755)).expect("is executable");
        let doctor = doctor.replace("PLUGINS", &plugins.to_string_lossy());
        fs::write(home.join("bundle/bin/mlxcel.json"), doctor).expect("written");
        for case in ["llama8b-4", "qwen3moe-4", "llama8b-16", "smollm2-4"] {
            fs::create_dir_all(home.join("work").join(case)).expect("created");
            fs::write(home.join("work").join(case).join("config.json"), "{}").expect("written");
        }
        // Whether this machine's Python has mlx-lm makes no difference.
        fs::create_dir_all(home.join("modules/mlx_lm")).expect("created");
        fs::write(home.join("modules/mlx_lm/__init__.py"), "").expect("written");
        Self { home }
    }

    fn run(&self, arguments: &[&str], fails: &str) -> Output {
        Command::new("sh")
            .arg(self.home.join("bundle/run.sh"))
            .args(arguments)
            .current_dir(&self.home)
            .env("LOG", self.home.join("log"))
            .env("FAILS", fails)
            .env("PYTHONPATH", self.home.join("modules"))
            .env("MLXCEL_PLUGIN_PATH", "/elsewhere")
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env_remove("LLAMA_CPP")
            .env_remove("SPLIT_MODEL")
            .output()
            .expect("is run")
    }

    /// How the programs were started, one a line.
    fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.home.join("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.home);
    }
}

fn said(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

fn exists(home: &Path, name: &str) -> bool {
    home.join(name).exists()
}

#[test]
fn a_run_is_of_the_bundles_own_plugins_and_of_this_run_alone() {
    let bundle = Bundle::new("own", USABLE);
    let results = bundle.home.join("work/results");
    fs::create_dir_all(&results).expect("created");
    fs::write(results.join("smollm2-4.llama.json"), "[]").expect("written");
    let (code, stdout, stderr) = said(&bundle.run(&["work", "check", "measure"], ""));
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    let log = bundle.log();
    let ours: Vec<&String> = log
        .iter()
        .filter(|line| line.starts_with("mlxcel "))
        .collect();
    let own = format!(
        "--plugins-dir {}",
        bundle.home.join("bundle/lib/mlxcel/plugins").display()
    );
    assert!(
        ours.iter()
            .all(|line| line.contains(&own) && line.ends_with("path=")),
        "{ours:?}"
    );
    // Two devices together, then the first alone, by the name that the user's setting gives it.
    let benches = |devices: &str| {
        let is_one = |line: &&String| {
            line.contains("mlxcel bench") && line.contains(&format!("devices={devices} "))
        };
        log.iter().filter(is_one).count()
    };
    assert_eq!((benches(""), benches("5")), (2, 7), "{log:?}");
    assert_eq!(
        log.iter()
            .filter(|line| line.starts_with("split.py"))
            .count(),
        2
    );
    assert!(
        stdout.contains("commit 0123456789ab") && stdout.contains("llama.cpp was not measured"),
        "{stdout}"
    );
    assert!(!exists(&results, "smollm2-4.llama.json"));
    assert!(exists(
        &bundle.home,
        "work/results.before/smollm2-4.llama.json"
    ));
}

#[test]
fn a_step_that_fails_keeps_no_other_from_running() {
    let bundle = Bundle::new("fails", USABLE);
    let (code, stdout, stderr) =
        said(&bundle.run(&["work", "kernels", "check", "measure"], "kernels.py"));
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    assert!(
        stderr.ends_with("not as it should be: kernels.py\n"),
        "{stderr}"
    );
    for program in ["mixture.py", "conformance.py", "faults.py", "mlxcel bench"] {
        assert!(
            bundle.log().iter().any(|line| line.starts_with(program)),
            "{program}"
        );
    }
}

#[test]
fn nothing_runs_where_the_bundles_backend_is_not_usable() {
    for (name, doctor, why) in [
        ("unusable", UNUSABLE, "there is no driver"),
        ("elsewhere", ELSEWHERE, "has no backend cuda"),
    ] {
        let bundle = Bundle::new(name, doctor);
        let (code, _, stderr) = said(&bundle.run(&["work"], ""));
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.contains(why), "{stderr}");
        assert!(
            bundle
                .log()
                .iter()
                .all(|line| line.starts_with("mlxcel doctor")),
            "{:?}",
            bundle.log()
        );
    }
}

#[test]
fn a_command_that_is_wrong_makes_no_folder() {
    let bundle = Bundle::new("usage", USABLE);
    for (arguments, expected) in [
        (&["--help"][..], Some(0)),
        (&["-h"], Some(0)),
        (&["help"], Some(0)),
        (&["--nonsense"], Some(2)),
        (&["other", "mesure"], Some(2)),
    ] {
        let (code, stdout, stderr) = said(&bundle.run(arguments, ""));
        assert_eq!(code, expected, "{arguments:?}: {stdout}{stderr}");
        assert!(
            format!("{stdout}{stderr}").contains("run.sh"),
            "{arguments:?}"
        );
        assert!(
            !arguments.iter().any(|name| exists(&bundle.home, name)),
            "{arguments:?}"
        );
    }
    assert!(bundle.log().is_empty());
}

#[test]
fn a_table_of_nothing_or_of_errors_says_so() {
    let bundle = Bundle::new("table", USABLE);
    let table = |folder: &str| {
        let asked = Command::new("python3")
            .arg("bundle/table.py")
            .arg(folder)
            .current_dir(&bundle.home)
            .output();
        said(&asked.expect("is run"))
    };
    let (code, _, stderr) = table("nowhere");
    assert!(
        code == Some(1) && stderr.contains("nowhere is not a folder"),
        "{stderr}"
    );
    let results = bundle.home.join("results");
    fs::create_dir_all(&results).expect("created");
    let (code, _, stderr) = table("results");
    assert!(
        code == Some(1) && stderr.contains("has no results"),
        "{stderr}"
    );
    fs::write(results.join("llama8b-4.json"), r#"{"error": "no memory"}"#).expect("written");
    let slow = r#"{"device": "NVIDIA GH200", "results": [{"test": "tg128", "tokens_per_second": 1.0, "deviation": null}]}"#;
    fs::write(results.join("smollm2-4.json"), slow).expect("written");
    let (code, stdout, _) = table("results");
    assert!(
        code == Some(1) && stdout.contains("llama8b-4.json has no rates: no memory"),
        "{stdout}"
    );
    assert!(
        stdout.contains("| 1,000 |") && !stdout.contains(", missed"),
        "{stdout}"
    );
    fs::write(
        results.join("smollm2-4.json"),
        slow.replace("GH200", "H200"),
    )
    .expect("written");
    assert!(table("results").1.contains("| 1,000, missed |"));
}
