//! Prompts that no cache knows, of an exact number of tokens.

use serde_json::json;

use crate::error::LoadError;
use crate::http::Target;
use crate::random::Random;

/// Ordinary words: a prompt of them has about as many tokens as words with any tokenizer of English.
const WORDS: &str = "the of and to in that is was he for it with as his on be at by had not are but from or have an they \
    which one you were her all she there would their we him been has when who will more no if out so said what up its \
    about into than them can only other new some could time these two may then do first any my now such like our over \
    man me even most made after also did many before must through back years where much your way well down should \
    because each just those people how too little state good very make world still own see men work long get here \
    between both life being under never day same another know while last might us great old year off come since against \
    go came right used take three water house light morning river winter garden window letter story paper market \
    question village doctor teacher engine forest mountain harbour table music colour number silver copper evening";

/// Text of `words` words by chance.
pub fn text(random: &mut Random, words: usize) -> String {
    let all: Vec<&str> = WORDS.split_whitespace().collect();
    let chosen: Vec<&str> = (0..words)
        .filter_map(|_| all.get(random.below(all.len())).copied())
        .collect();
    chosen.join(" ")
}

/// Token ids of a text, from the server's own tokenizer.
pub fn tokens(target: &Target, text: &str) -> Result<Vec<u32>, LoadError> {
    let answer = target.post("/tokenize", &json!({"content": text}))?;
    let ids = answer.get("tokens").and_then(|list| list.as_array());
    let ids = ids.and_then(|list| {
        list.iter()
            .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
            .collect::<Option<Vec<u32>>>()
    });
    ids.ok_or_else(|| LoadError::Protocol {
        expected: "a list of token ids",
        found: crate::http::beginning(&answer.to_string()),
    })
}

/// A prompt of exactly `count` tokens.
pub fn prompt(target: &Target, random: &mut Random, count: usize) -> Result<Vec<u32>, LoadError> {
    let words = count + 16;
    let mut ids = tokens(target, &text(random, words))?;
    if ids.len() < count {
        return Err(LoadError::ShortPrompt {
            words,
            found: ids.len(),
            expected: count,
        });
    }
    ids.truncate(count);
    Ok(ids)
}

/// A text of about `count` tokens: as many words as the tokenizer says.
pub fn text_of_tokens(
    target: &Target,
    random: &mut Random,
    count: usize,
) -> Result<String, LoadError> {
    let sample = text(random, 200);
    let per_word = tokens(target, &sample)?.len() as f64 / 200.0;
    Ok(text(random, (count as f64 / per_word.max(0.1)) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_differ_from_each_other_and_repeat_with_the_seed() {
        let of = |stream| text(&mut Random::new(1, stream), 20);
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        assert_eq!(of(1).split(' ').count(), 20);
    }
}
