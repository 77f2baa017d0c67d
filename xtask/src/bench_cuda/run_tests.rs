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

const ENDLESS_ROOM: &str =
    "import shutil\nshutil.disk_usage = lambda _: shutil._ntuple_diskusage(0, 0, 0)\n";
/// Slow enough for what does not wait for it to come first.
const CMAKE: &str = r#"#!/bin/sh
case $1 in
-S) [ "$FAILS" != configure ] || { echo "CMake Error: no compiler"; exit 1; } ;;
--build) sleep 0.5; echo "llama.cpp built" >>"$LOG"; [ "$FAILS" != build ] || { echo "error: no"; exit 1; } ;;
esac
"#;
/// Says what it measured until then, and fails.
const BATCHED_BENCH: &str = r#"#!/bin/sh
echo "some words"
echo '{"pl": 8, "tg": 128, "speed_tg": 1.0}'
exit 1
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

    /// What `prepare` needs: modules, room on the disk, llama.cpp's sources and what builds them.
    fn can_prepare(&self) {
        for name in ["torch", "safetensors"] {
            let module = self.home.join("modules").join(name);
            fs::create_dir_all(&module).expect("created");
            fs::write(module.join("__init__.py"), "").expect("written");
        }
        fs::write(self.home.join("modules/sitecustomize.py"), ENDLESS_ROOM).expect("written");
        fs::create_dir_all(self.home.join("sources")).expect("created");
        fs::write(self.home.join("sources/CMakeLists.txt"), "").expect("written");
        self.program("tools/cmake", CMAKE);
        self.program("tools/ninja", "#!/bin/sh\n");
        self.program("tools/nvcc", "#!/bin/sh\n");
    }

    fn program(&self, name: &str, text: &str) {
        let path = self.home.join(name);
        fs::create_dir_all(path.parent().expect("is inside")).expect("created");
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("is executable");
    }

    /// With llama.cpp's sources named.
    fn prepare(&self, further: &[&str], fails: &str) -> Output {
        let mut command = self.command(fails);
        command.args(["work", "prepare"]).args(further);
        command.env("LLAMA_CPP", self.home.join("sources"));
        command.output().expect("is run")
    }

    fn run(&self, arguments: &[&str], fails: &str) -> Output {
        let mut command = self.command(fails);
        command.args(arguments).output().expect("is run")
    }

    fn command(&self, fails: &str) -> Command {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("sh");
        command
            .arg(self.home.join("bundle/run.sh"))
            .current_dir(&self.home)
            .env(
                "PATH",
                format!("{}:{path}", self.home.join("tools").display()),
            )
            .env("LOG", self.home.join("log"))
            .env("FAILS", fails)
            .env("PYTHONPATH", self.home.join("modules"))
            .env("MLXCEL_PLUGIN_PATH", "/elsewhere")
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env_remove("LLAMA_CPP")
            .env_remove("SPLIT_MODEL");
        command
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

#[test]
fn a_peer_that_fails_is_a_run_that_was_not_as_it_should_be() {
    for doctor in [
        USABLE.to_owned(),
        USABLE.replace(r#", {"name": "cuda:1"}"#, ""),
    ] {
        let bundle = Bundle::new("peer", &doctor);
        let (code, stdout, stderr) = said(&bundle.run(&["work", "measure"], "mlx_lm_speed.py"));
        assert_eq!(code, Some(1), "{stdout}{stderr}");
        let last = stderr.lines().last().unwrap_or_default();
        assert!(
            last.contains("not as it should be: mlx_lm_speed.py"),
            "{stderr}"
        );
        // The table comes all the same.
        assert!(stdout.contains("commit 0123456789ab"), "{stdout}");
    }
}

#[test]
fn a_llama_bench_that_fails_after_its_first_lines_has_failed() {
    let bundle = Bundle::new("llama", USABLE);
    bundle.program("work/llama.cpp/bin/llama-bench", "#!/bin/sh\necho '[]'\n");
    bundle.program("work/llama.cpp/bin/llama-batched-bench", BATCHED_BENCH);
    fs::write(bundle.home.join("work/smollm2-4.gguf"), "").expect("written");
    let (code, stdout, stderr) = said(&bundle.run(&["work", "measure"], ""));
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    assert!(
        stderr.ends_with("not as it should be: llama-batched-bench of smollm2-4\n"),
        "{stderr}"
    );
    let lines = bundle.home.join("work/results/smollm2-4.llama.jsonl");
    let lines = fs::read_to_string(lines).expect("is there");
    assert_eq!(lines, "{\"pl\": 8, \"tg\": 128, \"speed_tg\": 1.0}\n");
}

#[test]
fn what_does_not_compile_for_a_peer_fails_the_run_and_keeps_the_rest() {
    for (fails, expected) in [
        ("", None),
        ("configure", Some("building llama.cpp")),
        ("build", Some("building llama.cpp")),
        ("mlx_lm_speed.py", Some("compiling for mlx-lm")),
    ] {
        let bundle = Bundle::new("prepare", USABLE);
        bundle.can_prepare();
        let (code, stdout, stderr) = said(&bundle.prepare(&["check"], fails));
        assert_eq!(
            code,
            Some(i32::from(expected.is_some())),
            "{fails}: {stdout}{stderr}"
        );
        let last = stderr.lines().last().unwrap_or_default();
        let tells = |what| last.starts_with(&format!("run.sh: not as it should be: {what}"));
        assert!(expected.is_none_or(tells), "{fails}: {stderr}");
        let log = bundle.log();
        assert!(
            log.iter().any(|line| line.starts_with("faults.py")),
            "{log:?}"
        );
    }
}

#[test]
fn kernels_are_timed_when_nothing_compiles_any_more() {
    let bundle = Bundle::new("order", USABLE);
    bundle.can_prepare();
    let (code, stdout, stderr) = said(&bundle.prepare(&["kernels"], ""));
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    let log = bundle.log();
    let last = |what: &str| log.iter().rposition(|line| line.starts_with(what));
    let kernels = last("kernels.py").expect("was run");
    for compiles in ["llama.cpp built", "mlx_lm_speed.py"] {
        assert!(last(compiles).is_some_and(|at| at < kernels), "{log:?}");
    }
}

#[test]
fn what_llama_cpp_cannot_be_built_without_is_told_before_a_checkpoint_is_written() {
    let bundle = Bundle::new("tools", USABLE);
    bundle.can_prepare();
    // A path with nothing to build with, so that the interpreter has to be named in full.
    let interpreter = Command::new("python3")
        .args(["-c", "import sys; print(sys.executable)"])
        .output();
    let interpreter = said(&interpreter.expect("is run")).1;
    let tools = bundle.home.join("few");
    fs::create_dir_all(&tools).expect("created");
    std::os::unix::fs::symlink("/bin/cat", tools.join("cat")).expect("linked");
    let output = Command::new(interpreter.trim())
        .args(["bundle/machine.py", "bundle", "work", "prepare"])
        .current_dir(&bundle.home)
        .env("PATH", &tools)
        .env("LOG", bundle.home.join("log"))
        .env("PYTHONPATH", bundle.home.join("modules"))
        .env("LLAMA_CPP", bundle.home.join("sources"))
        .output();
    let (code, stdout, stderr) = said(&output.expect("is run"));
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    assert!(
        stderr.contains("there is no cmake and no ninja"),
        "{stderr}"
    );
    assert!(stdout.trim_end().ends_with(" no"), "{stdout}");
}
