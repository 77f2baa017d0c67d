//! `arch`, `plugin` and `doctor`: with no plugin, with good ones, and with each kind of bad one.

use std::path::{Path, PathBuf};

use mlxcel_tests::cli::{Finished, Mlxcel, real_plugins};
use mlxcel_tests::plugins::Healthy;
use serde_json::{Value, json};

/// A folder with the mock plugins and a bad file of each kind.
fn with_bad_plugins() -> Mlxcel {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    let whole = Healthy::Family.bytes().expect("built");
    mlxcel.file("plugins/libmlxcel_family_empty.so", "");
    mlxcel.file("plugins/libmlxcel_family_text.so", "not a library\n");
    mlxcel.file("plugins/libmlxcel_family_cut.so", &whole[..whole.len() / 2]);
    mlxcel.file("plugins/README.txt", "not looked at");
    mlxcel
}

fn states(list: &Value) -> Vec<(&str, &str)> {
    let plugins = list["plugins"].as_array().expect("array");
    plugins
        .iter()
        .map(|p| {
            (
                p["name"].as_str().unwrap_or_default(),
                p["state"].as_str().unwrap_or_default(),
            )
        })
        .collect()
}

#[test]
fn without_plugins_everything_answers() {
    let mlxcel = Mlxcel::new();
    insta::assert_snapshot!(mlxcel.run(["arch"]).show(), @r#"
    exit 0
    --- stdout
    --- stderr
    no family plugin was found: `mlxcel doctor` says where they are looked for
    "#);
    let arch = mlxcel.run(["arch", "--json"]).expect_success().json();
    assert_eq!(
        arch,
        json!({"mlxcel_version": env!("CARGO_PKG_VERSION"), "families": []})
    );
    insta::assert_snapshot!(mlxcel.run(["plugin", "list"]).show(), @r#"
    exit 0
    --- stdout
    --- stderr
    no plugin was found: `mlxcel doctor` says where they are looked for
    "#);
    assert_eq!(
        mlxcel.run(["plugin", "list", "--json"]).json()["plugins"],
        json!([])
    );
    insta::assert_snapshot!(mlxcel.run(["plugin", "show", "llama"]).show(), @r#"
    exit 4
    --- stdout
    --- stderr
    error: no plugin is called "llama", and none was found at all
    hint: `mlxcel plugin list` shows every plugin, `mlxcel doctor` where they are looked for
    "#);
    assert!(!mlxcel.path("cache").exists(), "looking writes nothing");
}

#[test]
fn arch_lists_what_the_plugins_can_run_in_the_established_form() {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    insta::assert_snapshot!(mlxcel.run(["arch"]).show(), @r#"
    exit 0
    --- stdout
    ID    CATEGORY  MODEL TYPES  GGUF  PLUGIN
    mock  dense     mock         mock  mock 0.1.0
    --- stderr
    "#);
    let mut document = mlxcel.run(["arch", "--json"]).expect_success().json();
    let hash = document["families"][0]["plugin"]["sha256"].take();
    assert_eq!(hash.as_str().map(str::len), Some(64));
    insta::assert_json_snapshot!(document, @r#"
    {
      "mlxcel_version": "0.1.0",
      "families": [
        {
          "id": "mock",
          "display_name": "Mock",
          "category": "dense",
          "model_types": [
            "mock"
          ],
          "aliases": [],
          "runtimes": [
            "generate"
          ],
          "modalities_in": [
            "text"
          ],
          "output": "tokens",
          "backends": {
            "mock": "supported"
          },
          "tensor_parallel": false,
          "pipeline_parallel": false,
          "drafters": [],
          "kv_modes": [
            "fp16"
          ],
          "gguf": [
            "mock"
          ],
          "task": "text-generation",
          "abi": {
            "major": 1,
            "minor": 4
          },
          "plugin": {
            "name": "mock",
            "version": "0.1.0",
            "sha256": null
          }
        }
      ]
    }
    "#);
}

/// The document's shape as other tools read it: no key less, and every value of the established type.
#[test]
fn every_row_of_arch_has_the_established_keys_and_types() {
    let mlxcel = Mlxcel::new().with_real_plugins();
    let document = mlxcel.run(["arch", "--json"]).expect_success().json();
    let families = document["families"].as_array().expect("array");
    let mut ids: Vec<&str> = families
        .iter()
        .map(|family| family["id"].as_str().expect("text"))
        .collect();
    assert!(
        ["llama", "mistral", "mixtral", "smollm3"]
            .iter()
            .any(|id| ids.contains(id)),
        "{ids:?}"
    );
    let rows = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), rows, "ids are unique");
    for family in families {
        for key in ["id", "display_name", "category", "output"] {
            assert!(family[key].is_string(), "{key}: {family}");
        }
        for key in [
            "model_types",
            "aliases",
            "runtimes",
            "modalities_in",
            "drafters",
            "kv_modes",
        ] {
            assert!(
                family[key]
                    .as_array()
                    .is_some_and(|list| list.iter().all(Value::is_string)),
                "{key}: {family}"
            );
        }
        assert!(!family["model_types"].as_array().expect("array").is_empty());
        assert!(family["backends"].is_object() && family["tensor_parallel"].is_boolean());
        assert!(family["pipeline_parallel"].is_boolean());
        assert_eq!(family["plugin"]["sha256"].as_str().map(str::len), Some(64));
        assert!(family["abi"]["major"].is_u64() && family["abi"]["minor"].is_u64());
    }
}

#[test]
fn each_bad_plugin_has_one_line_and_the_good_ones_work_on() {
    let mlxcel = with_bad_plugins();
    let done = mlxcel.run(["plugin", "list"]).expect_success();
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"\d{4,}", "[n]");
    settings.bind(|| insta::assert_snapshot!(done.show(), @r#"
    exit 0
    --- stdout
    PLUGIN        VERSION  ABI  STATE      FILE
    backend/mock  0.1.0    1.4  available  [home]/plugins/libmlxcel_backend_mock.so
    family/cut    -        -    rejected   [home]/plugins/libmlxcel_family_cut.so: truncated: the section table ends at byte [n], the file has [n]; copy the file again
    family/empty  -        -    rejected   [home]/plugins/libmlxcel_family_empty.so: the file is empty: copy or build the plugin again
    family/mock   0.1.0    1.4  available  [home]/plugins/libmlxcel_family_mock.so
    family/text   -        -    rejected   [home]/plugins/libmlxcel_family_text.so: expected an ELF library, found text that starts with "not a li": the file is not a plugin, remove or rename it
    --- stderr
    "#));
    let json = mlxcel
        .run(["plugin", "list", "--json"])
        .expect_success()
        .json();
    assert_eq!(
        states(&json),
        [
            ("mock", "available"),
            ("cut", "rejected"),
            ("empty", "rejected"),
            ("mock", "available"),
            ("text", "rejected")
        ]
    );
    let arch = mlxcel.run(["arch"]).expect_success();
    assert!(
        arch.stderr.contains("3 plugins cannot be used"),
        "{}",
        arch.show()
    );
}

#[test]
fn a_place_that_a_flag_names_and_that_is_not_there_is_told() {
    let mlxcel = Mlxcel::new();
    mlxcel.mock_model("m");
    // Whatever a command does with plugins, without the folder it is not what was asked for.
    let commands: [&[&str]; 5] = [
        &["plugin", "list"],
        &["arch"],
        &["doctor"],
        &["inspect", "-m", "./m"],
        &["generate", "-m", "./m", "-p", "x"],
    ];
    for command in commands {
        let run = mlxcel.run(command.iter().chain(&["--plugins-dir", "nowhere"]));
        insta::allow_duplicates! {
            insta::assert_snapshot!(run.show(), @r#"
            exit 4
            --- stdout
            --- stderr
            error: --plugins-dir: plugin folder nowhere does not exist
            hint: `mlxcel plugin list` shows every plugin, `mlxcel doctor` where they are looked for
            "#);
        }
    }
}

#[test]
fn show_says_all_that_the_file_says() {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    let done = mlxcel
        .run(["plugin", "show", "family/mock"])
        .expect_success();
    let mut settings = insta::Settings::clone_current();
    settings.add_filter("[0-9a-f]{64}", "[sha256]");
    settings.bind(|| {
        insta::assert_snapshot!(done.show(), @r#"
    exit 0
    --- stdout
    plugin       family/mock
    file         [home]/plugins/libmlxcel_family_mock.so
    place        directory
    state        available
    sha256       [sha256]
    version      0.1.0
    vendor       mlxcel
    abi          1.4, needs a host of 1.0 or newer
    built for    linux x86_64
    arch         mock (Mock): dense; model types mock; kv fp16
    --- stderr
    "#)
    });
    let both = mlxcel
        .run(["plugin", "show", "mock", "--json"])
        .expect_success()
        .json();
    assert_eq!(both["plugins"].as_array().map(Vec::len), Some(2));
    let missing = mlxcel.run(["plugin", "show", "mokc"]);
    insta::assert_snapshot!(missing.show(), @r#"
    exit 4
    --- stdout
    --- stderr
    error: no plugin is called "mokc"; there are backend/mock, family/mock
    hint: `mlxcel plugin list` shows every plugin, `mlxcel doctor` where they are looked for
    "#);
}

#[test]
fn verify_takes_plugins_through_every_stage() {
    let mlxcel = with_bad_plugins();
    let plugins = mlxcel.path("plugins");
    let done = mlxcel.run([Path::new("plugin"), Path::new("verify"), &plugins]);
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"\d{4,}", "[n]");
    settings.bind(|| insta::assert_snapshot!(done.show(), @r#"
    exit 4
    --- stdout
    PLUGIN        VERSION  ABI  RESULT          FILE
    backend/mock  0.1.0    1.4  ok              [home]/plugins/libmlxcel_backend_mock.so: score 1, host memory
    family/cut    -        -    failed at peek  [home]/plugins/libmlxcel_family_cut.so: truncated: the section table ends at byte [n], the file has [n]; copy the file again
    family/empty  -        -    failed at peek  [home]/plugins/libmlxcel_family_empty.so: the file is empty: copy or build the plugin again
    family/mock   0.1.0    1.4  ok              [home]/plugins/libmlxcel_family_mock.so
    family/text   -        -    failed at peek  [home]/plugins/libmlxcel_family_text.so: expected an ELF library, found text that starts with "not a li": the file is not a plugin, remove or rename it
    --- stderr
    error: 3 of 5 plugins cannot be used
    "#));
    let good = plugins.join(Healthy::Backend.file_name());
    let json = mlxcel
        .run([
            Path::new("plugin"),
            Path::new("verify"),
            &good,
            Path::new("--json"),
        ])
        .expect_success()
        .json();
    assert_eq!(
        (
            &json["plugins"][0]["ok"],
            &json["plugins"][0]["probe"]["score"]
        ),
        (&json!(true), &json!(1))
    );
}

/// Faults that show only when code of the plugin runs.
#[test]
fn a_plugin_that_harms_its_process_harms_only_the_childs() {
    for (fault, stage, code) in [
        ("abort_constructor", "probe", "crashed"),
        ("panic_open", "open", "panicked"),
        ("exit_constructor", "probe", "crashed"),
    ] {
        let mlxcel = Mlxcel::new();
        let file = Healthy::Faulty
            .with_fault(&mlxcel.dir("plugins"), fault)
            .expect("written");
        let done = mlxcel.run([
            Path::new("plugin"),
            Path::new("verify"),
            &file,
            Path::new("--json"),
        ]);
        assert_eq!(done.code, Some(4), "{fault}: {}", done.show());
        let plugin = &done.json()["plugins"][0];
        assert_eq!(
            (&plugin["ok"], &plugin["stage"], &plugin["code"]),
            (&json!(false), &json!(stage), &json!(code)),
            "{fault}"
        );
    }
}

/// Places that a variable names and that give nothing are told by every command that looks for plugins.
#[test]
fn no_command_passes_over_a_place_in_silence() {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    mlxcel.mock_model("model");
    let good = mlxcel.path("plugins");
    let places = ["plugins", "~/plugins", "/nonexistent/plugins"].map(PathBuf::from);
    let places = std::env::join_paths(places.iter().chain([&good])).expect("joined");
    let mlxcel = mlxcel.with("MLXCEL_PLUGIN_PATH", places);
    let all = [
        &["arch"][..],
        &["arch", "--json"],
        &["plugin", "list"],
        &["plugin", "show", "mock"],
        &["inspect", "-m", "./model"],
        &["run", "./model", "-p", "x", "--estimate-memory"],
        &["generate", "-m", "./model", "-p", "x", "--estimate-memory"],
        &["bench", "-m", "./model", "--estimate-memory", "--quiet"],
        &["serve", "./model", "--estimate-memory"],
    ];
    for args in all {
        let done = mlxcel.run(args).expect_success();
        assert_eq!(
            done.stderr,
            "warning: plugin folder plugins in MLXCEL_PLUGIN_PATH is relative and was ignored: give an absolute path\n\
             warning: plugin folder ~/plugins in MLXCEL_PLUGIN_PATH is relative and was ignored: give an absolute path\n\
             warning: plugin folder /nonexistent/plugins does not exist\n",
            "{args:?}"
        );
    }
    // The doctor's report has a line for each place.
    let done = mlxcel.run(["doctor"]).expect_success();
    assert_eq!(done.stderr, "");
    let lines: Vec<&str> = done
        .stdout
        .lines()
        .filter(|line| line.starts_with("  directory "))
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @"
    directory  plugins: plugin folder plugins in MLXCEL_PLUGIN_PATH is relative and was ignored: give an absolute path
    directory  ~/plugins: plugin folder ~/plugins in MLXCEL_PLUGIN_PATH is relative and was ignored: give an absolute path
    directory  /nonexistent/plugins: does not exist
    directory  [home]/plugins: 2 plugins
    ");
}

fn doctor(mlxcel: &Mlxcel) -> Finished {
    mlxcel.run(["doctor", "--json"])
}

#[test]
fn the_doctor_says_what_is_missing_and_where_it_looked() {
    let mlxcel = Mlxcel::new();
    let done = mlxcel.run(["doctor"]);
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"(?m)^memory .*$", "memory [figures]");
    settings.add_filter(r"(?m)^  bundled .*$", "  bundled [path]");
    settings.add_filter(r"(?m)^  system .*$", "  system [path]");
    settings.add_filter(r"(?m)^(mlxcel .*), \w+ \w+$", "$1, [platform]");
    settings.bind(|| insta::assert_snapshot!(done.show(), @r#"
    exit 1
    --- stdout
    mlxcel 0.1.0, plugin ABI 1.4, [platform]
    plugin places
      user       [home]/.local/share/mlxcel/plugins: does not exist
      bundled [path]
      system [path]
    families
      none found
    backends
      none found
    memory [figures]
    cache         [home]/cache (writable)
    model store   [home]/cache/models (writable)
    endpoint      http://127.0.0.1:9, no token
    problem       no backend plugin was found
                  see the places above; name a folder with --plugins-dir or MLXCEL_PLUGIN_PATH, or build the plugins that come with mlxcel
    problem       no family plugin was found
                  see the places above; name a folder with --plugins-dir or MLXCEL_PLUGIN_PATH, or build the plugins that come with mlxcel
    not ready     no model can be run before the problems above are solved
    --- stderr
    "#));
    let json = doctor(&mlxcel).json();
    assert_eq!(json["ready"], json!(false));
    assert_eq!(json["problems"].as_array().map(Vec::len), Some(2));
    assert!(!mlxcel.path("cache").exists(), "looking writes nothing");
}

#[test]
fn the_doctor_tells_good_plugins_from_bad_ones() {
    let mlxcel = with_bad_plugins();
    let done = doctor(&mlxcel).expect_success();
    let json = done.json();
    assert_eq!(
        (&json["ready"], &json["auto_backend"]),
        (&json!(true), &json!("mock"))
    );
    let usable = |list: &Value| -> Vec<bool> {
        let list = list.as_array().expect("array");
        list.iter()
            .map(|plugin| plugin["usable"].as_bool().expect("flag"))
            .collect()
    };
    assert_eq!(usable(&json["backends"]), [true]);
    assert_eq!(usable(&json["families"]), [false, false, true, false]);
    for family in json["families"].as_array().expect("array") {
        assert!(
            family["usable"] == json!(true) || family["reason"].is_string(),
            "{family}"
        );
    }
}

#[test]
fn a_backend_that_cannot_run_here_is_not_ready_and_says_why() {
    let mlxcel = Mlxcel::new();
    let plugins = mlxcel.dir("plugins");
    Healthy::Family.copy_to(&plugins).expect("copied");
    Healthy::Backend
        .with_fault(&plugins, "score_zero")
        .expect("written");
    let done = doctor(&mlxcel.with("MLXCEL_PLUGIN_PATH", &plugins));
    assert_eq!(done.code, Some(1));
    let json = done.json();
    assert_eq!(
        json["backends"][0]["reason"],
        json!("driver 550 found, 570 or newer needed")
    );
    assert_eq!(
        json["problems"][0]["problem"],
        json!("no backend plugin can be used")
    );
}

/// Of a backend that loads and finds nothing to compute on, verify and doctor say the same in their own words, and a command that
/// names it says what to do.
#[test]
fn a_backend_without_a_device_is_told_alike_by_all() {
    let mlxcel = Mlxcel::new();
    let plugins = mlxcel.dir("plugins");
    Healthy::Family.copy_to(&plugins).expect("copied");
    let file = Healthy::Backend
        .with_fault(&plugins, "score_zero")
        .expect("written");
    mlxcel.mock_model("model");
    let mlxcel = mlxcel.with("MLXCEL_PLUGIN_PATH", &plugins);
    let done = mlxcel.run(["doctor"]);
    let told = done.stdout.lines().map(str::trim);
    let told: Vec<&str> = told.filter(|line| line.starts_with("bad ")).collect();
    insta::assert_snapshot!(told.join("\n"), @"bad mock 0.1.0: score 0, driver 550 found, 570 or newer needed; devices: host memory");
    let done = mlxcel.run([Path::new("plugin"), Path::new("verify"), &file]);
    insta::assert_snapshot!(done.show(), @r#"
    exit 0
    --- stdout
    PLUGIN        VERSION  ABI  RESULT            FILE
    backend/mock  0.1.0    1.4  ok, but not here  [home]/plugins/libmlxcel_backend_mock.so: score 0, driver 550 found, 570 or newer needed
    --- stderr
    this command asks whether a plugin can be loaded, `mlxcel doctor` whether it can compute here, which backend/mock cannot
    "#);
    for backend in ["mock", "other", ""] {
        let done = mlxcel.run(["generate", "-m", "./model", "-p", "x", "--backend", backend]);
        assert_eq!(done.code, Some(4), "{backend}");
        let lines: Vec<&str> = done.stderr.lines().collect();
        assert!(
            lines.len() == 2 && lines[1].starts_with("hint: "),
            "{lines:?}"
        );
        assert!(!lines[0].contains("--backend :"), "{lines:?}");
    }
}

#[test]
fn a_plugin_that_is_passed_over_is_not_bad() {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    let user = mlxcel.dir(".local/share/mlxcel/plugins");
    Healthy::Family.copy_to(&user).expect("copied");
    let done = mlxcel.run(["doctor"]).expect_success();
    let told = done.stdout.lines().filter(|line| line.contains(" mock "));
    let told: Vec<&str> = told
        .filter(|line| line.contains("architecture") || line.contains("shadowed"))
        .collect();
    insta::assert_snapshot!(told.join("\n"), @"
    ok  mock 0.1.0: 1 architecture
    -   mock 0.1.0: [home]/.local/share/mlxcel/plugins/libmlxcel_family_mock.so: shadowed by [home]/plugins/libmlxcel_family_mock.so
    ");
}

#[test]
fn folders_that_cannot_be_read_are_in_the_doctors_report() {
    use std::os::unix::fs::PermissionsExt;
    let mlxcel = Mlxcel::new().with_mock_plugins();
    let closed = mlxcel.dir("plugins/mlxcel-backend-closed");
    let set = |mode| std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(mode));
    set(0o000).expect("closed");
    let done = doctor(&mlxcel);
    // Nothing is closed to an administrator.
    let is_open = std::fs::read_dir(&closed).is_ok();
    set(0o700).expect("opened");
    if is_open {
        return;
    }
    let json = done.expect_success().json();
    let places = json["places"].as_array().expect("array");
    let told = places
        .iter()
        .filter_map(|place| place["unread"][0].as_str());
    let told: Vec<&str> = told.collect();
    assert!(
        told.len() == 1 && told[0].contains("cannot be read"),
        "{told:?}"
    );
    assert_eq!(json["problems"][0]["problem"], json!(told[0]));
}

#[test]
fn the_real_plugins_are_ready() {
    let mlxcel = Mlxcel::new().with_real_plugins();
    let json = doctor(&mlxcel).expect_success().json();
    assert_eq!(
        (&json["ready"], &json["auto_backend"]),
        (&json!(true), &json!("cpu"))
    );
    let plugins = real_plugins();
    mlxcel
        .run([Path::new("plugin"), Path::new("verify"), &plugins])
        .expect_success();
}
