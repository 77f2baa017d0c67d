//! Small tokenizers, built as each line of models builds its own, beside transformers: a corpus of texts
//! that tokenizers disagree about, and conversations through chat templates to ids.
//!
//! How they and the numbers were made is in `tests/golden/tools/make_tokenizers.py`. Needs no plugin.

use std::path::{Path, PathBuf};

use mlxcel::template::{ChatTemplate, Limits, RenderInput, TemplateError, TemplateSet, WallClock};
use mlxcel::text::{
    BosRule, Boundary, DetokenizerOptions, Prompt, StreamStart, TextError, Tokenizer,
};
use serde_json::{Map, Value};

struct Line {
    folder: PathBuf,
    tokenizer: Tokenizer,
    golden: Value,
}

impl Line {
    fn open(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("golden/tokenizers")
            .join(name);
        let golden = std::fs::read(folder.join("golden.json")).unwrap();
        Self {
            tokenizer: Tokenizer::from_directory(&folder).unwrap(),
            golden: serde_json::from_slice(&golden).unwrap(),
            folder,
        }
    }

    fn list(&self, key: &str) -> &[Value] {
        self.golden[key].as_array().unwrap()
    }

    fn render(&self, case: &Value) -> Result<Prompt, TemplateError> {
        let mut variables: Map<String, Value> = case.as_object().unwrap().clone();
        let messages = variables.remove("messages").unwrap();
        let tools = variables.remove("tools");
        let header = variables.remove("add_generation_prompt");
        let header = header.and_then(|flag| flag.as_bool()).unwrap_or(true);
        let set = TemplateSet::from_directory(&self.folder).unwrap();
        let source = set.select(None, tools.is_some()).unwrap();
        let template = ChatTemplate::compile(source, self.tokenizer.control(), Limits::default())?;
        template.render(&RenderInput {
            messages: messages.as_array().unwrap(),
            tools: tools.as_ref(),
            documents: None,
            add_generation_prompt: header,
            continue_final: None,
            named_tokens: self.tokenizer.named(),
            variables: &variables,
            now: WallClock {
                unix_seconds: self.golden["unix_seconds"].as_i64().unwrap(),
                utc_offset_seconds: 0,
            },
        })
    }
}

fn ids(value: &Value) -> Vec<u32> {
    mlxcel_tests::golden::ids(value)
}

/// What differs between a result and the reference's.
fn compare<T: PartialEq + std::fmt::Debug>(
    wrong: &mut Vec<String>,
    what: &str,
    text: &Value,
    got: Result<T, TextError>,
    want: &T,
) {
    match got {
        Ok(got) if got == *want => {}
        got => wrong.push(format!(
            "{what} of {text}:\n  got  {got:?}\n  want {want:?}"
        )),
    }
}

fn check_texts(name: &str) {
    let line = Line::open(name);
    let tokenizer = &line.tokenizer;
    let mut wrong = Vec::new();
    for entry in line.list("texts") {
        let text = entry["text"].as_str().unwrap();
        let (plain, framed) = (ids(&entry["ids"]), ids(&entry["framed"]));
        let got = tokenizer.encode_markup(text, Boundary::Bare);
        compare(&mut wrong, "ids", &entry["text"], got, &plain);
        let got = tokenizer.encode_markup(text, Boundary::AsTrained);
        // A text that begins with the token already gets no second one here; the reference adds it.
        let twice = framed.len() > plain.len() && framed.first() == plain.first();
        let framed = if twice { plain.clone() } else { framed };
        compare(&mut wrong, "framed ids", &entry["text"], got, &framed);
        for (skip_control, key) in [(false, "decoded_all"), (true, "decoded_text")] {
            let options = DetokenizerOptions {
                skip_control,
                start: StreamStart::Text,
            };
            let want = entry[key].as_str().unwrap().to_owned();
            let got = Ok(tokenizer.decode(&plain, options));
            compare(&mut wrong, key, &entry["text"], got, &want);
            let mut stream = tokenizer.detokenizer(options);
            let mut got: String = plain.iter().map(|id| stream.push(*id)).collect();
            got.push_str(&stream.finish());
            compare(
                &mut wrong,
                &format!("{key}, one by one,"),
                &entry["text"],
                Ok(got),
                &want,
            );
        }
    }
    assert!(wrong.is_empty(), "{name}:\n{}", wrong.join("\n"));
}

fn check_chats(name: &str) {
    let line = Line::open(name);
    let mut wrong = Vec::new();
    for chat in line.list("chats") {
        let title = chat["name"].as_str().unwrap();
        let case = &line.golden["conversations"][title];
        match (line.render(case), chat["rendered"].as_str()) {
            (Ok(prompt), Some(rendered)) => {
                if prompt.text() != rendered {
                    let got = prompt.text();
                    wrong.push(format!("{title}:\n  got  {got:?}\n  want {rendered:?}"));
                    continue;
                }
                let got = line
                    .tokenizer
                    .encode_template(&prompt, BosRule::FromTemplate);
                compare(&mut wrong, "ids", &chat["name"], got, &ids(&chat["ids"]));
            }
            (Err(TemplateError::Raised { message }), None) if chat["raises"] == *message => {}
            (got, want) => wrong.push(format!("{title}: got {got:?}, want {want:?} {chat}")),
        }
    }
    assert!(wrong.is_empty(), "{name}:\n{}", wrong.join("\n"));
}

macro_rules! lines {
    ($($test:ident: $name:literal;)*) => {
        mod texts {
            $(#[test]
            fn $test() {
                super::check_texts($name);
            })*
        }
        mod chats {
            $(#[test]
            fn $test() {
                super::check_chats($name);
            })*
        }

        /// A line whose golden is checked in and which no test reads would be no test at all.
        #[test]
        fn every_line_is_read() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/tokenizers");
            let mut found: Vec<String> = std::fs::read_dir(folder)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            found.sort();
            let mut read = vec![$($name.to_owned()),*];
            read.sort();
            assert_eq!(found, read);
        }
    };
}

lines! {
    llama2: "llama2";
    mistral_metaspace: "mistral-metaspace";
    mistral_tekken: "mistral-tekken";
    llama3: "llama3";
    llama4: "llama4";
    smollm: "smollm";
    qwen: "qwen";
    gemma: "gemma";
    deepseek: "deepseek";
}
