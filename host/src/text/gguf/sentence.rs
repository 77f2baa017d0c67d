//! SentencePiece BPE: `tokenizer.ggml.model` = `llama`, and `gemma4`, which stores its merges.

use std::collections::HashMap;

use tokenizers::Tokenizer;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as DecoderSequence;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::utils::Sequence as NormalizerSequence;

use super::vocabulary::{TokenKind, Vocabulary};
use super::{Defaults, GgufTokenizer, byte_level};
use crate::text::TextError;
use crate::text::guard::guarded;

/// Stands for a blank inside pieces.
const SPACE: &str = "\u{2581}";

pub(super) fn build(
    gguf: &GgufTokenizer,
    vocabulary: &Vocabulary,
) -> Result<(Tokenizer, Defaults), TextError> {
    let merges = merges_from_scores(&gguf.scores, vocabulary)?;
    // llama.cpp's defaults for this kind: the ids of the first Llama vocabulary, where the file has such tokens.
    let usual = |id: u32, text: &str| {
        vocabulary
            .token(id)
            .filter(|token| *token == text)
            .map(|_| id)
    };
    let defaults = Defaults {
        bos: usual(1, "<s>"),
        eos: usual(2, "</s>"),
        unk: usual(0, "<unk>"),
        add_bos: true,
    };
    let prefix_space = gguf.add_space_prefix.unwrap_or(true);
    Ok((
        assemble(gguf, vocabulary, merges, prefix_space, defaults)?,
        defaults,
    ))
}

pub(super) fn build_with_merges(
    gguf: &GgufTokenizer,
    vocabulary: &Vocabulary,
) -> Result<(Tokenizer, Defaults), TextError> {
    let vocab: Vocab = vocabulary
        .iter()
        .map(|(id, token, _)| (token.to_owned(), id))
        .collect();
    let merges = byte_level::merges(&gguf.merges, &vocab)?;
    let prefix_space = gguf.add_space_prefix.unwrap_or(false);
    let defaults = Defaults::default();
    Ok((
        assemble(gguf, vocabulary, merges, prefix_space, defaults)?,
        defaults,
    ))
}

fn assemble(
    gguf: &GgufTokenizer,
    vocabulary: &Vocabulary,
    merges: Merges,
    prefix_space: bool,
    defaults: Defaults,
) -> Result<Tokenizer, TextError> {
    let vocab: Vocab = vocabulary
        .iter()
        .map(|(id, token, _)| (token.to_owned(), id))
        .collect();
    let byte_fallback = vocabulary
        .iter()
        .any(|(_, _, kind)| kind == TokenKind::Byte);
    let unknown = gguf
        .unk
        .or(defaults.unk)
        .and_then(|id| vocabulary.token(id))
        .map(str::to_owned);
    guarded("build the SentencePiece model", || {
        let mut model = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .fuse_unk(true)
            .byte_fallback(byte_fallback);
        if let Some(unknown) = unknown {
            model = model.unk_token(unknown);
        }
        let mut library = Tokenizer::new(model.build()?);
        let replace = NormalizerWrapper::from(Replace::new(" ", SPACE)?);
        let mut normalizers = Vec::new();
        let mut decoders = vec![
            DecoderWrapper::from(Replace::new(SPACE, " ")?),
            ByteFallback::new().into(),
            Fuse::new().into(),
        ];
        if prefix_space {
            normalizers.push(NormalizerWrapper::from(Prepend::new(SPACE.to_owned())));
            decoders.push(Strip::new(' ', 1, 0).into());
        }
        normalizers.push(replace);
        library.with_normalizer(Some(NormalizerSequence::new(normalizers)));
        library.with_decoder(Some(DecoderSequence::new(decoders)));
        library.add_tokens(&vocabulary.added());
        Ok(library)
    })
}

/// Recovers the merges: SentencePiece joins the pair whose result scores highest, so each piece contributes every way
/// to split it into two known pieces, and the pieces are ranked by score. Runs of blanks are user-defined pieces and
/// take part; control, byte and unused pieces do not.
fn merges_from_scores(scores: &[f32], vocabulary: &Vocabulary) -> Result<Merges, TextError> {
    let count = vocabulary.iter().count();
    if scores.len() != count {
        let detail = format!("{} scores for {count} tokens", scores.len());
        return Err(TextError::invalid("tokenizer.ggml.scores", detail));
    }
    if let Some(id) = scores.iter().position(|score| score.is_nan()) {
        return Err(TextError::invalid(
            "tokenizer.ggml.scores",
            format!("the score of token {id} is not a number"),
        ));
    }
    let takes_part = |kind| matches!(kind, TokenKind::Normal | TokenKind::UserDefined);
    let known: HashMap<&str, u32> = vocabulary
        .iter()
        .filter(|(.., kind)| takes_part(*kind))
        .map(|(id, token, _)| (token, id))
        .collect();
    let mut ranked: Vec<(f32, u32, u32)> = Vec::new();
    for (id, token, _) in vocabulary.iter().filter(|(.., kind)| takes_part(*kind)) {
        let score = scores.get(id as usize).copied().unwrap_or_default();
        let mut splits: Vec<(u32, u32)> = token
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| {
                Some((*known.get(token.get(..at)?)?, *known.get(token.get(at..)?)?))
            })
            .collect();
        splits.sort_unstable();
        ranked.extend(splits.into_iter().map(|(left, right)| (score, left, right)));
    }
    // Stable: pieces of one score stay in vocabulary order.
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
    let text = |id: u32| vocabulary.token(id).unwrap_or_default().to_owned();
    Ok(ranked
        .into_iter()
        .map(|(_, left, right)| (text(left), text(right)))
        .collect())
}
