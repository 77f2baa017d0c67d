//! `run` and `generate` with a real model, through the real plugins: what `cargo xtask test` prepares.

use std::path::Path;

use mlxcel_tests::cli::{Finished, Mlxcel, real_model};
use rustix::process::{Pid, Signal, kill_process};

const CAPITAL: &str = "What is the capital of France?";

fn mlxcel() -> Mlxcel {
    Mlxcel::new().with_real_plugins()
}

fn run_with<'a>(
    mlxcel: &Mlxcel,
    command: &'a [&'a str],
    rest: &[&'a str],
    input: &str,
) -> Finished {
    let model = real_model();
    let mut args: Vec<&Path> = command.iter().map(Path::new).collect();
    args.push(&model);
    args.extend(rest.iter().map(Path::new));
    mlxcel.run_with_input(args, input)
}

fn generate(rest: &[&str]) -> Finished {
    run_with(&mlxcel(), &["generate", "-m"], rest, "")
}

#[test]
fn an_answer_is_on_topic_and_the_first_line_names_the_plugins() {
    let done = generate(&["-p", CAPITAL, "-n", "16"]).expect_success();
    assert_eq!(done.stdout, "The capital of France is Paris.\n");
    let first = done.stderr.lines().next().expect("a line");
    for part in [
        "SmolLM2-135M-Instruct",
        "family llama",
        "backend cpu",
        "context 8192 tokens",
    ] {
        assert!(first.contains(part), "{part}: {first}");
    }
}

#[test]
fn two_runs_without_flags_are_equal_and_quiet_is_quiet() {
    let once =
        || generate(&["-p", "Write one sentence about rivers.", "-n", "12", "-q"]).expect_success();
    let (first, second) = (once(), once());
    assert_eq!(first.stdout, second.stdout);
    assert_eq!(first.stderr, "");
}

#[test]
fn a_seed_repeats_a_random_answer() {
    let with = |seed: &str| {
        generate(&[
            "-p",
            "Tell a story.",
            "-n",
            "12",
            "-q",
            "--temp",
            "1.5",
            "--seed",
            seed,
        ])
        .expect_success()
        .stdout
    };
    let first = with("1");
    assert_eq!(first, with("1"));
    assert_ne!(first, with("2"));
}

#[test]
fn a_stop_text_ends_the_answer_before_it() {
    let done = generate(&[
        "-p",
        CAPITAL,
        "-n",
        "16",
        "-q",
        "--stop",
        "is Par",
        "--profile",
    ])
    .expect_success();
    assert_eq!(done.stdout, "The capital of France \n");
    assert!(done.stderr.contains("ended by --stop"), "{}", done.stderr);
}

#[test]
fn the_prompt_may_come_from_stdin_and_without_a_template() {
    let done = run_with(
        &mlxcel(),
        &["gen", "-m"],
        &["-p", "-", "-n", "4", "-q"],
        CAPITAL,
    )
    .expect_success();
    assert_eq!(done.stdout, "The capital of France\n");
    let raw = generate(&[
        "-p",
        "The capital of France is",
        "--no-chat-template",
        "-n",
        "1",
        "-q",
    ])
    .expect_success();
    assert_eq!(raw.stdout.trim(), "Paris");
}

#[test]
fn a_system_message_and_another_template_reach_the_model() {
    let tokens = |rest: &[&str]| -> usize {
        let args: Vec<&str> = ["-p", "hi", "-n", "1", "-q", "--profile"]
            .iter()
            .chain(rest)
            .copied()
            .collect();
        let done = generate(&args).expect_success();
        let (_, rest) = done.stderr.split_once("prompt: ").expect("a profile");
        rest.split(' ')
            .next()
            .expect("a number")
            .parse()
            .expect("a number")
    };
    let plain = tokens(&[]);
    assert!(
        tokens(&[
            "--system",
            "You are a pirate who speaks of nothing but the sea and ships."
        ]) != plain
    );
    assert!(tokens(&["--chat-template", "{{ messages[0]['content'] }}"]) < plain);
}

#[test]
fn a_prompt_that_does_not_fit_is_refused_with_both_numbers() {
    let done = generate(&["-p", &"word ".repeat(100), "-c", "64", "-q"]);
    assert_eq!(
        (done.code, done.stdout.as_str()),
        (Some(1), ""),
        "{}",
        done.show()
    );
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"has \d+ tokens", "has [n] tokens");
    settings.bind(|| insta::assert_snapshot!(done.stderr, @"error: the prompt has [n] tokens and the context holds 64: shorten it, or raise --ctx-size if the model allows"));
    let done = generate(&["-p", "x", "-c", "100000", "-q"]);
    assert_eq!(done.code, Some(2), "{}", done.show());
    insta::assert_snapshot!(done.stderr, @"error: --ctx-size 100000 is beyond the model's 8192 tokens: ask for at most that");
    // That is said before any word on memory, of which no machine would have enough.
    for memory in ["--estimate-memory", "-q"] {
        let home = mlxcel().with("MEMORY_LIMIT", "50M");
        let long = run_with(
            &home,
            &["generate", "-m"],
            &["-p", "x", "-c", "100000", memory],
            "",
        );
        assert_eq!((long.code, &long.stderr), (Some(2), &done.stderr));
    }
}

#[test]
fn a_model_that_does_not_fit_is_refused_unless_forced() {
    let small = || mlxcel().with("MEMORY_LIMIT", "50M");
    let refused = run_with(
        &small(),
        &["generate", "-m"],
        &["-p", "x", "-n", "1", "-q"],
        "",
    );
    assert_eq!(
        (refused.code, refused.stdout.as_str()),
        (Some(7), ""),
        "{}",
        refused.show()
    );
    assert!(
        refused
            .stderr
            .contains("50.0 MiB may be used (MEMORY_LIMIT)"),
        "{}",
        refused.stderr
    );
    for flag in ["--force", "--no-memory-check"] {
        run_with(
            &small(),
            &["generate", "-m"],
            &["-p", "x", "-n", "1", "-q", flag],
            "",
        )
        .expect_success();
    }
    let estimate =
        run_with(&small(), &["generate", "-m"], &["--estimate-memory"], "").expect_success();
    assert!(
        estimate.stdout.starts_with("memory: ") && estimate.stdout.contains("budget 50.0 MiB"),
        "{}",
        estimate.show()
    );
}

#[test]
fn what_cannot_be_used_is_told_before_the_model_is_loaded() {
    for (rest, code, words) in [
        (
            vec!["-p", "x", "--backend", "cuda"],
            4,
            "no backend plugin has this name",
        ),
        (
            vec!["-p", "x", "--family", "nowhere"],
            4,
            "no family plugin has this name",
        ),
        (
            vec!["-p", "x", "--chat-template-file", "nowhere.jinja"],
            2,
            "nowhere.jinja",
        ),
        (vec!["-p", "x", "--plugin", "nowhere.so"], 4, "nowhere.so"),
    ] {
        let done = generate(&rest);
        assert_eq!(
            (done.code, done.stdout.as_str()),
            (Some(code), ""),
            "{}",
            done.show()
        );
        assert!(
            done.stderr.starts_with("error: ") && done.stderr.contains(words),
            "{}",
            done.stderr
        );
    }
}

#[test]
fn a_conversation_on_a_pipe_is_one_turn_a_line() {
    let input = "What is the capital of France?\n/clear\n/nope\n\"\"\"\nWhat is the capital\nof France?\n\"\"\"\n/bye\nnever\n";
    let done = run_with(&mlxcel(), &["run"], &["-n", "16", "-q"], input).expect_success();
    let answers: Vec<&str> = done.stdout.lines().collect();
    assert_eq!(answers, ["The capital of France is Paris."; 2]);
    assert_eq!(
        done.stderr,
        "warning: there is no command /nope: /? lists them\n"
    );
    assert!(!done.stdout.contains('\u{1b}'));
}

#[test]
fn a_later_turn_reuses_what_was_computed_for_earlier_ones() {
    let done = run_with(
        &mlxcel(),
        &["run"],
        &["-n", "12", "--profile", "-q"],
        "My name is Bob.\nWhat is my name?\n",
    )
    .expect_success();
    let cached: Vec<usize> = done
        .stderr
        .lines()
        .filter_map(|line| {
            line.split_once('(')?
                .1
                .split_once(" cached")?
                .0
                .parse()
                .ok()
        })
        .collect();
    assert_eq!(cached.len(), 2, "{}", done.stderr);
    assert!(cached[0] == 0 && cached[1] > 20, "{cached:?}");
}

#[test]
fn a_turn_that_fails_does_not_end_a_conversation_but_shows_in_the_code() {
    let long = "word ".repeat(200);
    let input = format!("{long}\n{CAPITAL}\n");
    let done = run_with(&mlxcel(), &["run"], &["-c", "96", "-n", "16", "-q"], &input);
    assert_eq!(done.code, Some(1), "{}", done.show());
    assert_eq!(done.stdout, "The capital of France is Paris.\n");
    assert!(
        done.stderr.ends_with("error: 1 of 2 turns failed\n"),
        "{}",
        done.stderr
    );
}

#[test]
fn ctrl_c_stops_the_answer_and_the_next_turn_is_answered() {
    let model = real_model();
    let mut running = mlxcel().start([Path::new("run"), &model, Path::new("-q")]);
    running.write("Write a very long story about a dog.\n");
    running.read_some(8);
    let process = Pid::from_raw(running.id() as i32).expect("a process");
    kill_process(process, Signal::INT).expect("signalled");
    running.write("What is the capital of France?\n/bye\n");
    let done = running.finish().expect_success();
    assert!(done.stdout.ends_with("Paris.\n"), "{}", done.stdout);
}

#[test]
fn ctrl_c_ends_a_single_answer_with_its_code() {
    let model = real_model();
    let mut running = mlxcel().start([
        Path::new("run"),
        &model,
        Path::new("-q"),
        Path::new("-p"),
        Path::new("Count to one thousand."),
    ]);
    running.read_some(4);
    let process = Pid::from_raw(running.id() as i32).expect("a process");
    kill_process(process, Signal::INT).expect("signalled");
    let done = running.finish();
    assert_eq!(
        (done.code, done.stderr.as_str()),
        (Some(130), ""),
        "{}",
        done.show()
    );
}

#[test]
fn a_reader_that_goes_away_ends_the_answer_quietly() {
    let model = real_model();
    let mut running = mlxcel().start([
        Path::new("run"),
        &model,
        Path::new("-q"),
        Path::new("-p"),
        Path::new("Count to one thousand."),
    ]);
    running.read_some(4);
    running.close_stdout();
    let done = running.finish();
    assert_eq!(
        (done.code, done.stderr.as_str()),
        (Some(0), ""),
        "{}",
        done.show()
    );
}
