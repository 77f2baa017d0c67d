//! Renders beside those of `transformers` (see `tests/golden/templates/make_golden.py`).

use serde_json::{Map, Value};

use super::*;
use crate::text::{ControlTokens, NamedTokens};

const GOLDEN: &str = include_str!("../../../tests/golden/templates/golden.json");
const TEMPLATES: [(&str, &str); 8] = [
    (
        "alternating",
        include_str!("../../../tests/golden/templates/alternating.jinja"),
    ),
    (
        "chatml",
        include_str!("../../../tests/golden/templates/chatml.jinja"),
    ),
    (
        "dated_tools",
        include_str!("../../../tests/golden/templates/dated_tools.jinja"),
    ),
    (
        "pieces",
        include_str!("../../../tests/golden/templates/pieces.jinja"),
    ),
    (
        "reasoning",
        include_str!("../../../tests/golden/templates/reasoning.jinja"),
    ),
    (
        "turns",
        include_str!("../../../tests/golden/templates/turns.jinja"),
    ),
    (
        "typed_macros",
        include_str!("../../../tests/golden/templates/typed_macros.jinja"),
    ),
    (
        "wide_marks",
        include_str!("../../../tests/golden/templates/wide_marks.jinja"),
    ),
];

/// Expressions whose difference from Jinja2 is known and has no use in a chat template.
const DIFFERENT: [&str; 2] = ["{{ +3 }}", "{{ '%s-%d' % ('a', 3) }}"];

fn golden() -> Value {
    serde_json::from_str(GOLDEN).unwrap()
}

fn named(golden: &Value) -> NamedTokens {
    golden["tokens"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(k, v)| (k.clone(), v.as_str().unwrap().to_owned()))
        .collect()
}

/// The control tokens that the templates write: marking must not change any render.
fn control() -> ControlTokens {
    let spellings = [
        "<s>",
        "</s>",
        "<pad>",
        "<|im_start|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
        "<|start|>",
        "<|message|>",
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "<|tool|>",
        "<|/tool|>",
        "[INST]",
        "[/INST]",
    ];
    ControlTokens::new(
        spellings
            .into_iter()
            .zip(0..)
            .map(|(text, id)| (id, text.to_owned())),
    )
}

fn render(golden: &Value, source: &str, case: &Value) -> Result<String, TemplateError> {
    let mut variables: Map<String, Value> = case.as_object().unwrap().clone();
    let messages = variables.remove("messages").unwrap();
    let tools = variables.remove("tools");
    let header = variables
        .remove("add_generation_prompt")
        .and_then(|flag| flag.as_bool())
        .unwrap_or(true);
    let continued = variables.remove("continue_final_message").is_some();
    let input = RenderInput {
        messages: messages.as_array().unwrap(),
        tools: tools.as_ref(),
        documents: None,
        add_generation_prompt: header,
        continue_final: continued.then(ContinueFinal::default),
        named_tokens: &named(golden),
        variables: &variables,
        now: WallClock {
            unix_seconds: golden["unix_seconds"].as_i64().unwrap(),
            utc_offset_seconds: 0,
        },
    };
    let template = ChatTemplate::compile(source, &control(), Limits::default())?;
    let prompt = template.render(&input)?;
    assert!(
        prompt.literal().is_empty(),
        "no case spells a control token in a message"
    );
    Ok(prompt.into_text())
}

/// `None` if the two agree, else what differs.
fn difference(expected: &Value, actual: Result<String, TemplateError>) -> Option<String> {
    match (actual, expected.get("output"), expected.get("raised")) {
        (Ok(text), Some(output), _) if *output == text => None,
        (Err(TemplateError::Raised { message }), None, Some(raised)) if *raised == message => None,
        (Err(_), None, None) => None,
        (actual, ..) => Some(format!("expected {expected}\n  actual {actual:?}")),
    }
}

#[test]
fn conversations_render_as_in_transformers() {
    let golden = golden();
    let mut wrong = Vec::new();
    for (name, source) in TEMPLATES {
        for (case, expected) in golden["templates"][name].as_object().unwrap() {
            let actual = render(&golden, source, &golden["conversations"][case]);
            wrong.extend(
                difference(expected, actual).map(|text| format!("{name} / {case}: {text}")),
            );
        }
    }
    assert!(
        wrong.is_empty(),
        "{} differ\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert_eq!(
        golden["templates"].as_object().unwrap().len(),
        TEMPLATES.len()
    );
}

#[test]
fn expressions_evaluate_as_in_jinja2() {
    let golden = golden();
    let mut case = golden["variables"].clone();
    case["messages"] = serde_json::json!([{"role": "user", "content": "x"}]);
    let mut wrong = Vec::new();
    for expected in golden["expressions"].as_array().unwrap() {
        let source = expected["source"].as_str().unwrap();
        let found = difference(expected, render(&golden, source, &case));
        if found.is_some() != DIFFERENT.contains(&source) {
            wrong.push(format!(
                "{source}\n  {}",
                found.unwrap_or_else(|| "no longer different".to_owned())
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} differ\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
