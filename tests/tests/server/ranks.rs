//! Models that are split over two, three and four processes on the CPU: the answers are those of the whole model, a rank that
//! is gone is said in health and to every request, and no process outlives the one that was started.

use std::path::Path;
use std::thread;

use mlxcel_tests::cli::{Finished, Mlxcel, real_model};
use mlxcel_tests::golden::folder;
use mlxcel_tests::http::Connection;
use mlxcel_tests::server::Server;
use mlxcel_tests::tiny::{Kind, copy_with_tokenizer};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// No rounding but that of sums.
const EXACT: [&str; 8] = [
    "--dtype",
    "f32",
    "--precision",
    "exact",
    "--cache-type-k",
    "f32",
    "--cache-type-v",
    "f32",
];

const PROMPT: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";

fn generate(mlxcel: &Mlxcel, model: &str, ranks: &str, flags: &[&str]) -> Finished {
    let fixed = ["generate", "-m", model, "--ignore-eos", "-t", "1"];
    let ranks = ["--tensor-parallel", ranks];
    let all = fixed.iter().chain(&EXACT).chain(&ranks).chain(flags);
    mlxcel.run(all)
}

fn same_text((kind, ranks): (Kind, &[&str])) {
    let mlxcel = Mlxcel::new().with_real_plugins();
    let model = copy_with_tokenizer(&mlxcel, kind);
    let model = model.to_str().expect("text");
    let prompt = ["-p", PROMPT, "-n", "40"];
    let whole = generate(&mlxcel, model, "1", &prompt).expect_success();
    assert!(!whole.stdout.is_empty(), "{kind:?}");
    for ranks in ranks {
        let split = generate(&mlxcel, model, ranks, &prompt).expect_success();
        assert_eq!(split.stdout, whole.stdout, "{kind:?} on {ranks} ranks");
    }
}

#[test]
fn plain_weights_give_the_same_text_on_every_number_of_ranks() {
    // Four heads and two of keys, which four ranks share; biases; one head of keys for both ranks.
    same_text((("llama", "llama-gqa"), &["2", "4"]));
    same_text((("llama", "llama-bias"), &["2"]));
    same_text((("llama", "rope-llama3"), &["2"]));
}

#[test]
fn quantised_weights_are_split_along_whole_groups() {
    same_text((("llama", "mlx-4bit-g32"), &["2"]));
    same_text((("llama", "mlx-mxfp4"), &["2"]));
    same_text((("qwen", "mlx-qwen2-4bit"), &["2"]));
}

/// Whoever says that another one can be split adds it here and to a test below or above.
#[test]
fn what_says_that_it_can_be_split_is_tested() {
    let mlxcel = Mlxcel::new().with_real_plugins();
    let document = mlxcel.run(["arch", "--json"]).expect_success().json();
    let families = document["families"].as_array().expect("a list");
    let splittable = families
        .iter()
        .filter(|arch| arch["tensor_parallel"] == true);
    let mut found: Vec<&str> = splittable.filter_map(|arch| arch["id"].as_str()).collect();
    found.sort_unstable();
    let tested = [
        "arcee",
        "gemma",
        "gemma2",
        "gemma3",
        "iquestcoder",
        "llama",
        "ministral3",
        "mistral3",
        "nemotron-nas",
        "qwen2",
        "qwen3",
        "smollm3",
    ];
    assert_eq!(found, tested);
}

#[test]
fn the_llama_line_can_be_split() {
    same_text((("llama", "smollm3"), &["2"]));
    same_text((("llama", "iquestcoder"), &["2"]));
    same_text((("llama", "arcee"), &["2", "4"]));
    same_text((("llama", "ministral3"), &["2"]));
    same_text((("llama", "mistral3"), &["2"]));
    same_text((("llama", "nemotron-nas"), &["2"]));
}

#[test]
fn dense_qwen_and_gemma_can_be_split() {
    same_text((("qwen", "qwen2-window"), &["2"]));
    same_text((("qwen", "qwen3"), &["2"]));
    same_text((("gemma", "gemma"), &["2"]));
    same_text((("gemma", "gemma2"), &["2"]));
    same_text((("gemma", "gemma3"), &["2"]));
}

/// Nine heads and three of keys.
#[test]
fn a_real_model_gives_the_same_text_on_three_ranks() {
    let mlxcel = Mlxcel::new().with_real_plugins();
    let model = real_model();
    let model = model.to_str().expect("text");
    let flags = ["-p", "The capital of France is", "-n", "8", "-c", "256"];
    let whole = generate(&mlxcel, model, "1", &flags).expect_success();
    let split = generate(&mlxcel, model, "3", &flags).expect_success();
    assert_eq!(split.stdout, whole.stdout);
}

#[test]
fn what_cannot_be_split_is_refused_by_name() {
    let mlxcel = Mlxcel::new().with_real_plugins();
    let of = |kind: Kind| {
        copy_with_tokenizer(&mlxcel, kind)
            .to_string_lossy()
            .into_owned()
    };
    let refused = |kind: Kind, ranks: &str, flags: &[&str]| {
        let finished = generate(
            &mlxcel,
            &of(kind),
            ranks,
            &[&["-p", "A", "-n", "1"], flags].concat(),
        );
        assert!(finished.stdout.is_empty());
        let errors = finished
            .stderr
            .lines()
            .filter(|line| line.starts_with("error: "));
        errors.collect::<Vec<_>>().join("\n")
    };
    let gqa = ("llama", "llama-gqa");
    insta::assert_snapshot!(refused(gqa, "3", &[]), @"error: --tensor-parallel 3: llama cannot be split: layer 0 has 2 key and value heads, which have to divide by the ranks, or the ranks by them");
    insta::assert_snapshot!(refused(("llama", "mixtral"), "2", &[]), @"error: --tensor-parallel 2: mixtral cannot be split: its family runs it whole only (`mlxcel arch --json` says which can be split)");
    // Groups of 64 among 64 inputs.
    let groups = refused(("llama", "mlx-6bit-g64"), "2", &[]);
    assert!(
        groups.contains("o_proj") && groups.contains("a rank has to have whole groups"),
        "{groups}"
    );
    assert!(refused(gqa, "0", &[]).contains("1..=64"));
    let model = of(gqa);
    let bench = [
        "bench",
        "-m",
        &model,
        "--perplexity",
        &model,
        "--tensor-parallel",
        "2",
    ];
    assert!(
        mlxcel
            .run(bench)
            .stderr
            .contains("leave out --tensor-parallel")
    );
}

/// Far more room than any test here needs.
const ROOM: &str = "10000000";

fn server(kind: Kind, ranks: &str) -> Server {
    server_with(kind, ranks, ROOM, &[])
}

fn server_with(kind: Kind, ranks: &str, budget: &str, flags: &[&str]) -> Server {
    let home = Mlxcel::new().with_real_plugins();
    let model = copy_with_tokenizer(&home, kind);
    server_of(home, &model, ranks, budget, flags)
}

fn server_of(home: Mlxcel, model: &Path, ranks: &str, budget: &str, flags: &[&str]) -> Server {
    let own = [
        "--tensor-parallel",
        ranks,
        "--temp",
        "0",
        "--kv-cache-budget",
        budget,
        "--parallel",
        "4",
        "--prefill-chunk-size",
        "16",
        "-t",
        "1",
        "--metrics",
    ];
    Server::start(home, model, &[&EXACT[..], &own, flags].concat())
}

fn question(prompt: &str, max_tokens: usize) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true, "logprobs": 2})
}

/// Text and logarithms of probabilities.
fn answer(server: &Server, prompt: &str) -> (String, Vec<f64>) {
    let body = server
        .post("/v1/completions", &question(prompt, 24))
        .success();
    let choice = &body["choices"][0];
    let text = choice["text"].as_str().expect("text").to_owned();
    let logprobs = choice["logprobs"]["token_logprobs"]
        .as_array()
        .expect("a list");
    (
        text,
        logprobs
            .iter()
            .map(|value| value.as_f64().expect("a number"))
            .collect(),
    )
}

fn assert_same((text, logprobs): &(String, Vec<f64>), expected: &(String, Vec<f64>)) {
    assert_eq!(text, &expected.0);
    assert_eq!(logprobs.len(), expected.1.len());
    let far = logprobs.iter().zip(&expected.1).map(|(a, b)| (a - b).abs());
    assert!(
        far.fold(0.0, f64::max) < 1e-4,
        "{logprobs:?} {:?}",
        expected.1
    );
}

/// Q4_K, and Q6_K in groups of 16, which stay packed.
#[test]
fn packed_weights_of_gguf_files_are_split_too() {
    let model = folder("llama", "gguf-kquants").join("model.gguf");
    let start = |ranks| {
        let home = Mlxcel::new().with_real_plugins();
        server_of(home, &model, ranks, ROOM, &[])
    };
    let (whole, split) = (start("1"), start("2"));
    for prompt in ["AB", PROMPT] {
        assert_same(&answer(&split, prompt), &answer(&whole, prompt));
    }
}

#[test]
fn many_requests_at_once_get_what_the_whole_model_answers_alone() {
    let kind = ("llama", "llama-gqa");
    let whole = server(kind, "1");
    let prompts: Vec<&str> = (1..PROMPT.len())
        .step_by(4)
        .map(|len| &PROMPT[..len])
        .collect();
    let expected: Vec<_> = prompts
        .iter()
        .map(|prompt| answer(&whole, prompt))
        .collect();
    // Five pages, of which each of four requests wants two: some step back. Of a rank's one head, in f32.
    let five_pages = (5 * 32 * 2 * (8 + 8) * 4).to_string();
    let (wide, narrow) = (server(kind, "2"), server_with(kind, "2", &five_pages, &[]));
    // The second time from the prefix cache.
    for split in [&wide, &wide, &narrow] {
        let found: Vec<_> = thread::scope(|scope| {
            let asked = prompts
                .iter()
                .map(|prompt| scope.spawn(|| answer(split, prompt)));
            let asked: Vec<_> = asked.collect();
            asked
                .into_iter()
                .map(|one| one.join().expect("answers"))
                .collect()
        });
        for (found, expected) in found.iter().zip(&expected) {
            assert_same(found, expected);
        }
    }
    assert_eq!(wide.metric("mlxcel_batch_preemptions_total"), 0.0);
    assert!(narrow.metric("mlxcel_batch_preemptions_total") > 0.0);
    for split in [wide, narrow] {
        assert_eq!(end(split, Signal::TERM), Some(0));
    }
}

/// Text alone, of tokens that every rank chooses for itself where the next step does not wait for them.
fn text(server: &Server, (prompt, at): (&str, usize)) -> String {
    // Some end by a text that only the tokens tell.
    let stop: &[&str] = if at % 3 == 2 { &["e", "7"] } else { &[] };
    let body = json!({
        "prompt": prompt, "max_tokens": 8 + 3 * at, "seed": at, "temperature": (at % 2) as f64, "top_k": 40, "top_p": 0.9,
        "ignore_eos": at % 3 != 2, "stop": stop,
    });
    let body = server.post("/v1/completions", &body).success();
    body["choices"][0]["text"]
        .as_str()
        .expect("text")
        .to_owned()
}

#[test]
fn ranks_go_one_step_ahead_of_the_tokens_that_they_all_choose() {
    let kind = ("llama", "llama-gqa");
    let asked: Vec<(&str, usize)> = (1..PROMPT.len())
        .step_by(3)
        .enumerate()
        .map(|(at, len)| (&PROMPT[..len], at))
        .collect();
    let whole = server(kind, "1");
    let expected: Vec<String> = asked.iter().map(|one| text(&whole, *one)).collect();
    assert!(expected.iter().any(|text| !text.is_empty()));
    let five_pages = (5 * 32 * 2 * (8 + 8) * 4).to_string();
    for (budget, lookahead) in [(ROOM, "on"), (&five_pages, "on"), (ROOM, "off")] {
        let split = server_with(kind, "2", budget, &["--lookahead", lookahead]);
        let together: Vec<String> = thread::scope(|scope| {
            let asked = asked.iter().map(|one| scope.spawn(|| text(&split, *one)));
            let asked: Vec<_> = asked.collect();
            asked
                .into_iter()
                .map(|one| one.join().expect("answers"))
                .collect()
        });
        assert_eq!(together, expected, "{lookahead}, {budget}");
        let alone: Vec<String> = asked.iter().map(|one| text(&split, *one)).collect();
        assert_eq!(alone, expected, "{lookahead}, {budget}");
        // Logits of every step come to the host in between.
        assert_same(&answer(&split, PROMPT), &answer(&whole, PROMPT));
        assert_eq!(text(&split, asked[1]), expected[1]);
        assert_eq!(end(split, Signal::TERM), Some(0));
    }
}

/// Processes whose parent is `parent` and that are ranks.
fn ranks_of(parent: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten();
    let numbers = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    numbers
        .filter(|number| is_rank(*number, Some(parent)))
        .collect()
}

fn is_rank(number: u32, parent: Option<u32>) -> bool {
    // A process may end while it is looked at.
    let read =
        |name: &str| std::fs::read_to_string(format!("/proc/{number}/{name}")).unwrap_or_default();
    let of_parent = parent.is_none_or(|parent| {
        let line = format!("PPid:\t{parent}");
        read("status").lines().any(|found| found == line)
    });
    of_parent
        && read("cmdline")
            .split('\0')
            .any(|argument| argument == "__rank")
}

fn signal(process: u32, signal: Signal) {
    let process = Pid::from_raw(process as i32).expect("a process");
    kill_process(process, signal).expect("signalled");
}

/// Ends the server and waits until its ranks are gone too.
fn end(mut server: Server, how: Signal) -> Option<i32> {
    let ranks = ranks_of(server.id());
    signal(server.id(), how);
    let code = server.wait().code;
    server.wait_for("the ranks are gone", |_| {
        !ranks.iter().any(|rank| is_rank(*rank, None))
    });
    code
}

#[cfg(target_os = "linux")]
#[test]
fn no_rank_outlives_the_first() {
    for how in [Signal::TERM, Signal::INT, Signal::KILL] {
        let server = server(("llama", "llama-gqa"), "2");
        assert_eq!(ranks_of(server.id()).len(), 1);
        let code = end(server, how);
        assert_eq!(code, (how != Signal::KILL).then_some(0));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_that_is_gone_ends_every_request_and_health_says_so() {
    let server = server(("llama", "llama-gqa"), "4");
    let ranks = ranks_of(server.id());
    assert_eq!(ranks.len(), 3);
    answer(&server, "AB");
    let mut stream = Connection::open(server.address());
    let mut body = question("AB", 200);
    body["stream"] = true.into();
    let headers = ["Content-Type: application/json"];
    stream.send(
        "POST",
        "/v1/completions",
        &headers,
        body.to_string().as_bytes(),
    );
    assert_eq!(stream.head().status, 200);
    assert!(stream.chunk().is_some());
    signal(ranks[1], Signal::KILL);
    let mut rest = Vec::new();
    while let Some(chunk) = stream.chunk() {
        rest.extend(chunk);
    }
    let rest = String::from_utf8_lossy(&rest).into_owned();
    assert!(rest.contains("ended (signal: 9 (SIGKILL))"), "{rest}");

    server.wait_for("health says so", |server| {
        server.get("/health").status == 503
    });
    for _ in 0..2 {
        let health = server.get("/health").json();
        let message = health["error"]["message"]
            .as_str()
            .expect("text")
            .to_owned();
        assert!(message.starts_with("rank "), "{message}");
        assert!(message.ends_with("start again"), "{message}");
        let refused = server.post("/v1/completions", &question("AB", 4));
        assert_eq!(
            (refused.status, refused.json()["error"]["message"].as_str()),
            (503, Some(message.as_str()))
        );
    }
    assert!(ranks_of(server.id()).is_empty());
    assert_eq!(end(server, Signal::TERM), Some(0));
}

/// As a device that never ends a step: nobody tells rank 0 that its peer will not go on.
#[cfg(target_os = "linux")]
#[test]
fn a_rank_that_hangs_is_a_stuck_step_and_the_server_can_still_end() {
    let server = server_with(("llama", "llama-gqa"), "2", ROOM, &["--step-timeout", "1"]);
    let ranks = ranks_of(server.id());
    answer(&server, "AB");
    signal(ranks[0], Signal::STOP);
    let refused = server.post("/v1/completions", &question("ABC", 4));
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert_eq!(refused.json()["error"]["code"], "engine_stuck");
    assert_eq!(server.get("/health").status, 503);
    let mut server = server;
    signal(server.id(), Signal::TERM);
    assert_eq!(server.wait().code, Some(0));
    signal(ranks[0], Signal::CONT);
    server.wait_for("the rank is gone", |_| !is_rank(ranks[0], None));
}

/// What ranks say when the first one is gone in the middle of a step is for nobody: who ended it knows.
#[test]
fn ranks_that_lost_the_first_are_silent() {
    let mut server = server(("llama", "llama-gqa"), "4");
    let mut stream = Connection::open(server.address());
    let mut body = question("AB", 200);
    body["stream"] = true.into();
    let headers = ["Content-Type: application/json"];
    let body = body.to_string();
    stream.send("POST", "/v1/completions", &headers, body.as_bytes());
    assert_eq!(stream.head().status, 200);
    assert!(stream.chunk().is_some());
    signal(server.id(), Signal::KILL);
    // Stderr ends when nobody has it any more.
    let ended = server.wait();
    assert_eq!(ended.code, None);
    let last = ended.stderr.lines().last().unwrap_or_default();
    assert!(last.starts_with("ready: "), "{}", ended.stderr);
}
