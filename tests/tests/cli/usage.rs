//! The command line itself: help, versions, what is refused.

use mlxcel_tests::cli::Mlxcel;

#[test]
fn the_commands_and_their_short_descriptions() {
    let help = Mlxcel::new().run(["--help"]).expect_success().stdout;
    insta::assert_snapshot!(help, @r#"
    Runs language models through plugins

    Usage: mlxcel <COMMAND>

    Commands:
      run       Chat with a model, or answer one prompt
      generate  Answer one prompt and end [alias: gen]
      serve     Serve a model over HTTP
      list      List the models in the store
      rm        Remove a model from the store
      download  Download a model
      inspect   Say whether a model fits into memory, without loading it
      arch      List the architectures that the plugins found here can run
      plugin    List, show and verify plugins
      bench     Measure the speed of a model on this machine
      doctor    Examine the installation and say what to do

    Options:
      -h, --help     Print help
      -V, --version  Print version

    Exit codes: 0 done, 1 failure, 2 usage, 3 model not found, 4 plugin or backend, 5 model files, 6
    download, 7 memory, 130 Ctrl-C.
    Results go to stdout, everything else to stderr.
    "#);
}

#[test]
fn the_version_names_the_plugin_interface() {
    let version = Mlxcel::new().run(["--version"]).expect_success().stdout;
    let expected = format!(
        "mlxcel {} (plugin ABI {}.{})\n",
        env!("CARGO_PKG_VERSION"),
        mlxcel_abi::version::ABI_MAJOR,
        mlxcel_abi::version::ABI_MINOR
    );
    assert_eq!(version, expected);
}

#[test]
fn what_does_not_exist_is_refused_by_name() {
    let mlxcel = Mlxcel::new();
    for args in [
        vec!["generate", "-m", "x", "-p", "x", "--image", "cat.png"],
        vec!["generate", "-m", "x", "-p", "x", "--adapter", "lora"],
        vec!["generate", "-m", "x", "-p", "x", "--draft-model", "y"],
        vec!["generate", "-m", "x", "-p", "x", "--kv-cache-mode", "int8"],
        vec!["run", "x", "--tp-size", "2"],
        vec!["run", "x", "--grammar", "root"],
        vec!["inspect", "-m", "x", "--quant", "int4"],
        vec!["serve", "x", "--models-max", "2"],
        vec!["embed"],
    ] {
        let done = mlxcel.run(&args);
        let what = if args.len() == 1 {
            args[0]
        } else {
            args[args.len() - 2]
        };
        assert_eq!((done.code, done.stdout.as_str()), (Some(2), ""), "{args:?}");
        assert!(
            done.stderr.contains(&format!("'{what}'")),
            "{}",
            done.stderr
        );
    }
}

#[test]
fn values_out_of_range_are_refused_with_the_range() {
    let mlxcel = Mlxcel::new();
    let first_line = |flag: &str, value: &str| {
        let done = mlxcel.run(["generate", "-m", "x", "-p", "x", flag, value]);
        assert_eq!(done.code, Some(2), "{flag} {value}");
        done.stderr.lines().next().unwrap_or_default().to_owned()
    };
    let lines = [
        first_line("--temp", "-1"),
        first_line("--temp", "nan"),
        first_line("--top-p", "1.5"),
        first_line("--min-p", "x"),
        first_line("--top-k", "-3"),
        first_line("--repetition-penalty", "0"),
        first_line("--repeat-last-n", "-2"),
        first_line("-n", "0"),
        first_line("--seed", "x"),
        first_line("--dry-base", "0.5"),
        first_line("--adaptive-decay", "nan"),
        first_line("--mirostat", "3"),
        first_line("--samplers", "top_k;heat"),
        first_line("--logit-bias", "7"),
        first_line("--dtype", "f8"),
        first_line("--cache-type-k", "q5_1"),
        first_line("--cache-type-v", "f17"),
        first_line("--ctx-size", "many"),
        first_line("-c", "-1"),
        first_line("--stop", ""),
    ];
    insta::assert_snapshot!(lines.join("\n"), @r#"
    error: invalid value '-1' for '--temp <T>': expected 0 or more
    error: invalid value 'nan' for '--temp <T>': expected a finite number
    error: invalid value '1.5' for '--top-p <P>': expected a number from 0 to 1
    error: invalid value 'x' for '--min-p <P>': expected a number
    error: invalid value '-3' for '--top-k <N>': -3 is not in 0..=4294967295
    error: invalid value '0' for '--repetition-penalty <R>': expected more than 0
    error: invalid value '-2' for '--repeat-last-n <N>': -2 is not in -1..=2147483647
    error: invalid value '0' for '--max-tokens <N>': expected a whole number above 0, or -1 for no limit
    error: invalid value 'x' for '--seed <N>': invalid digit found in string
    error: invalid value '0.5' for '--dry-base <X>': expected a number from 1 to 100
    error: invalid value 'nan' for '--adaptive-decay <X>': expected a number from 0 to 0.99
    error: invalid value '3' for '--mirostat <N>': 3 is not in 0..=2
    error: invalid value 'top_k;heat' for '--samplers <NAME;...>': there is no sampler "heat", expected penalties (e), dry (d), top_n_sigma (s), top_k (k), typ_p (y), top_p (p), min_p (m), xtc (x), temperature (t), adaptive_p (a)
    error: invalid value '7' for '--logit-bias <TOKEN+BIAS>': expected a token id and a number with its sign, such as 15043-1
    error: invalid value 'f8' for '--dtype <DTYPE>'
    error: invalid value 'q5_1' for '--cache-type-k <TYPE>': expected f32, f16, bf16, q8_0 or q4_0
    error: invalid value 'f17' for '--cache-type-v <TYPE>': expected f32, f16, bf16, q8_0 or q4_0
    error: invalid value 'many' for '--ctx-size <N>': expected a number of tokens; 0 is the model's own limit, there is no -1
    error: invalid value '-1' for '--ctx-size <N>': expected a number of tokens; 0 is the model's own limit, there is no -1
    error: invalid value '' for '--stop <TEXT>': expected a text: an empty one would end every answer at once
    "#);
}

#[test]
fn flags_that_contradict_each_other_are_refused() {
    let mlxcel = Mlxcel::new();
    for args in [
        vec![
            "generate",
            "-m",
            "x",
            "-p",
            "x",
            "--no-chat-template",
            "--system",
            "s",
        ],
        vec![
            "generate",
            "-m",
            "x",
            "-p",
            "x",
            "--chat-template",
            "t",
            "--chat-template-file",
            "f",
        ],
        vec!["generate", "-m", "x", "-p", "x", "--quiet", "--verbose"],
        vec!["list", "--json", "-q"],
        vec!["generate", "-m", "x"],
        vec!["rm"],
    ] {
        assert_eq!(mlxcel.run(&args).code, Some(2), "{args:?}");
    }
}

#[test]
fn a_malformed_variable_is_named() {
    for (variable, value) in [
        ("MLXCEL_OFFLINE", "perhaps"),
        ("MLXCEL_DEFAULT_ORG", "../up"),
        ("MLXCEL_LOG", "mlxcel=loud"),
    ] {
        let done = Mlxcel::new().with(variable, value).run(["list"]);
        assert_eq!(done.code, Some(2), "{variable}");
        assert!(
            done.stderr.starts_with("error: ") && done.stderr.contains(variable),
            "{}",
            done.stderr
        );
    }
}

/// The command for the program's own children is no suggestion; others still are.
#[test]
fn a_mistyped_command_is_answered_with_commands_for_people() {
    let mlxcel = Mlxcel::new();
    for (name, tip) in [
        ("prob", None),
        ("__prob", None),
        ("inspec", Some("'inspect'")),
        ("plug", Some("'plugin'")),
    ] {
        let done = mlxcel.run([name]);
        assert_eq!(done.code, Some(2));
        assert!(!done.stderr.contains("'__probe'"), "{}", done.show());
        let tips = done.stderr.lines().filter(|line| line.contains("tip:"));
        let tips: Vec<&str> = tips.collect();
        assert_eq!(tips.len(), usize::from(tip.is_some()), "{}", done.show());
        assert!(
            tip.is_none_or(|tip| tips.concat().contains(tip)),
            "{}",
            done.show()
        );
    }
}

/// What `--help` says of a flag, in one line.
fn help_of(command: &str, flag: &str) -> String {
    let help = Mlxcel::new().run([command, "--help"]).expect_success();
    let mut lines = help.stdout.lines();
    let is_start = |line: &&str| {
        let mut words = line.split([' ', ',']).filter(|word| !word.is_empty());
        line.starts_with("  ") && words.any(|word| word == flag)
    };
    let start = lines.find(is_start).unwrap_or_default();
    let is_inside = |line: &&str| line.is_empty() || line.starts_with("          ");
    let text: Vec<&str> = std::iter::once(start)
        .chain(lines.take_while(is_inside))
        .flat_map(str::split_whitespace)
        .collect();
    text.join(" ")
}

/// Defaults that are the backend's are said to be, in the help of the commands that measure, serve and answer alike.
#[test]
fn help_says_whose_choice_a_default_is() {
    let shared = [
        "--dtype",
        "--cache-type-k",
        "--threads",
        "--precision",
        "--lookahead",
    ];
    let of = |command: &str| shared.map(|flag| help_of(command, flag)).join("\n");
    let text = of("serve");
    for command in ["run", "generate", "bench"] {
        assert_eq!(of(command), text, "{command}");
    }
    insta::assert_snapshot!(text, @"
    --dtype <DTYPE> Float type of activations Possible values: - auto: What backend and checkpoint prefer - f32: 32 bits - f16: IEEE 16 bits - bf16: bfloat16 [default: auto]
    --cache-type-k <TYPE> Type of cached keys: f32, f16, bf16, q8_0 or q4_0, and that of the values; unless given the backend's choice beside f32 activations, else the type of the activations
    -t, --threads <N> Compute threads of each process; 0 lets the backend decide [default: 0]
    --precision <PRECISION> How products are computed, where the backend has a choice Possible values: - auto: What the backend prefers - exact: In the type of the activations - high: With activations rounded to 16 bits in groups - fast: With activations rounded to what is fastest [default: auto]
    --lookahead <LOOKAHEAD> Give the device its next step before the last one's tokens are read; answers are the same Possible values: - auto: On where the backend says that it goes on working meanwhile - on: Wherever tokens are chosen on the device - off: Never [default: auto]
    ");
    let steps = ["--prefill-chunk-size", "--prefill-beside-decode"];
    let steps = steps.map(|flag| help_of("serve", flag));
    insta::assert_snapshot!(steps.join("\n"), @"
    --prefill-chunk-size <N> Most rows of prompts and answers in one step of the engine, at least --parallel [default: the backend's, else 512]
    --prefill-beside-decode <N> Of them, most rows of prompts while answers run: less is smoother, more begins sooner [default: a quarter of the backend's, 128 or more]
    ");
    let lists = ["--n-prompt", "--n-gen", "--repetitions"];
    let lists = lists.map(|flag| help_of("bench", flag));
    insta::assert_snapshot!(lists.join("\n"), @"
    -p, --n-prompt <N,..> Prompt lengths to measure, in tokens; 0 measures none [default: 512]
    -n, --n-gen <N,..> Answer lengths to measure, in tokens; 0 measures none [default: 128]
    -r, --repetitions <REPETITIONS> Runs of each case that are counted; one more comes first and is not [default: 3]
    ");
}
