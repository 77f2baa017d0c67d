//! Byte-level BPE (`tokenizer.ggml.model` = `gpt2`).

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{SplitDelimiterBehavior, Tokenizer};

use super::dialect::{self, Dialect, Step, UnicodeForm};
use super::vocabulary::Vocabulary;
use super::{Defaults, GgufTokenizer};
use crate::text::TextError;
use crate::text::guard::guarded;

pub(super) fn build(
    gguf: &GgufTokenizer,
    vocabulary: &Vocabulary,
) -> Result<(Tokenizer, Defaults), TextError> {
    let name = gguf.pre.as_deref().unwrap_or("default");
    let dialect = dialect::find(name).ok_or_else(|| TextError::UnknownPreTokenizer {
        name: name.to_owned(),
        known: dialect::known_pre_tokenizers().join(", "),
    })?;
    let vocab: Vocab = vocabulary
        .iter()
        .map(|(id, token, _)| (token.to_owned(), id))
        .collect();
    let merges = merges(&gguf.merges, &vocab)?;
    let library = guarded("build the BPE model", || {
        let model = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .ignore_merges(dialect.ignore_merges)
            .build()?;
        let mut library = Tokenizer::new(model);
        library.with_pre_tokenizer(Some(pre_tokenizer(dialect)?));
        library.with_decoder(Some(ByteLevel::new(false, true, false)));
        if dialect.unicode == UnicodeForm::Composed {
            library.with_normalizer(Some(NormalizerWrapper::from(NFC)));
        }
        library.add_tokens(&vocabulary.added());
        Ok(library)
    })?;
    Ok((
        library,
        Defaults {
            add_bos: dialect.add_bos,
            ..Defaults::default()
        },
    ))
}

fn pre_tokenizer(dialect: &Dialect) -> Result<Sequence, tokenizers::Error> {
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for step in dialect.steps {
        match step {
            Step::Regex(pattern) => {
                let pattern = SplitPattern::Regex((*pattern).to_owned());
                steps.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into());
            }
            Step::EachDigit => steps.push(Digits::new(true).into()),
        }
    }
    steps.push(ByteLevel::new(false, true, false).into());
    Ok(Sequence::new(steps))
}

/// Merges as pairs. Files exist whose merges mention pieces that the vocabulary lacks; such a merge can never apply.
/// If none can, the lists do not belong together.
pub(super) fn merges(lines: &[String], vocab: &Vocab) -> Result<Merges, TextError> {
    let mut merges = Merges::with_capacity(lines.len());
    for (index, line) in lines.iter().enumerate() {
        // The separator is the first blank that is not the first character: a piece may itself be a blank.
        let at = line
            .char_indices()
            .skip(1)
            .find(|(_, character)| *character == ' ')
            .map(|(at, _)| at);
        let Some((left, right)) = at.and_then(|at| Some((line.get(..at)?, line.get(at + 1..)?)))
        else {
            let detail =
                format!("merge {index} is `{line}`, expected two pieces with a blank between");
            return Err(TextError::invalid("tokenizer.ggml.merges", detail));
        };
        if vocab.contains_key(left)
            && vocab.contains_key(right)
            && vocab.contains_key(&format!("{left}{right}"))
        {
            merges.push((left.to_owned(), right.to_owned()));
        }
    }
    if merges.is_empty() && !lines.is_empty() {
        let detail = format!(
            "none of {} merges has its pieces in the vocabulary",
            lines.len()
        );
        return Err(TextError::invalid("tokenizer.ggml.merges", detail));
    }
    Ok(merges)
}
