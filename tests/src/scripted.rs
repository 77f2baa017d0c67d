//! A model whose answers are known: every token has one successor, and a step costs next to nothing.
//!
//! A token is a byte. After a small letter comes the next one, after `z` comes `a`; a digit is followed by the next one
//! and `9` by `!`, after which the answer ends; `$` by the three bytes of a euro sign, and that by `!`; everything else
//! by `a`.

use std::path::PathBuf;

use mlxcel_registry::checkpoint::testing::SafetensorsBuilder;
use serde_json::{Map, Value, json};

use crate::cli::Mlxcel;

/// The one control token, which ends an answer.
const END: usize = 256;
const VOCABULARY: usize = END + 1;

/// Messages become lines, and the answer begins after `assistant:`, so with `a`.
pub const TEMPLATE: &str = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\\n' }}{% endfor %}\
                            {% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}";

/// A checkpoint of the model in the home folder of `mlxcel`. `script` are members of its configuration, such as
/// `"delay_us"`; see the mock family.
pub fn scripted_model(mlxcel: &Mlxcel, name: &str, script: &Value) -> PathBuf {
    let mut config = json!({"model_type": "mock", "vocab_size": VOCABULARY, "eos_token_id": END});
    if let (Some(config), Some(script)) = (config.as_object_mut(), script.as_object()) {
        config.extend(script.clone());
    }
    mlxcel.file(&format!("{name}/config.json"), config.to_string());
    mlxcel.file(&format!("{name}/tokenizer.json"), tokenizer().to_string());
    let settings = json!({"eos_token": "<|end|>", "chat_template": TEMPLATE});
    mlxcel.file(
        &format!("{name}/tokenizer_config.json"),
        settings.to_string(),
    );
    let weights = SafetensorsBuilder::new()
        .f32("table", &[VOCABULARY, VOCABULARY], &table())
        .build();
    mlxcel.file(&format!("{name}/model.safetensors"), weights);
    mlxcel.path(name)
}

/// What the model says after `text`, up to `tokens` bytes; nothing of it is special.
pub fn continuation(text: &str, tokens: usize) -> String {
    let mut bytes = Vec::new();
    let mut last = text.bytes().last().unwrap_or_default();
    while bytes.len() < tokens {
        match successor(usize::from(last)) {
            END => break,
            next => last = next as u8,
        }
        bytes.push(last);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn successor(token: usize) -> usize {
    let byte = u8::try_from(token).unwrap_or_default();
    usize::from(match byte {
        b'a'..=b'y' | b'0'..=b'8' => byte + 1,
        b'9' | 0xac => b'!',
        b'!' => return END,
        b'$' => 0xe2,
        0xe2 => 0x82,
        0x82 => 0xac,
        _ => b'a',
    })
}

fn table() -> Vec<f32> {
    let mut table = vec![0.0; VOCABULARY * VOCABULARY];
    for token in 0..VOCABULARY {
        if let Some(logit) = table.get_mut(token * VOCABULARY + successor(token)) {
            *logit = 60.0;
        }
    }
    table
}

/// GPT-2's byte alphabet without merges: ids are bytes.
fn tokenizer() -> Value {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut moved = 0;
    let letters = (0..256u32).map(|byte| {
        if printable(byte) {
            byte
        } else {
            moved += 1;
            0x100 + moved - 1
        }
    });
    tokenizer_of(letters.chain([0]).filter_map(char::from_u32), END)
}

/// A tokenizer of one letter a token, ids in the order of `letters`; the one in the place `end` is a control token that
/// ends answers instead.
pub fn tokenizer_of(letters: impl Iterator<Item = char>, end: usize) -> Value {
    let named = |(id, letter): (usize, char)| match id == end {
        true => ("<|end|>".to_owned(), json!(id)),
        false => (letter.to_string(), json!(id)),
    };
    let vocabulary: Map<String, Value> = letters.enumerate().map(named).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": end, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": [],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn continuations() {
        assert_eq!(continuation("x", 4), "yzab");
        assert_eq!(continuation("6", 99), "789!");
        assert_eq!(continuation("cost $", 99), "€!");
        assert_eq!(continuation("assistant:", 3), "abc");
    }
}
