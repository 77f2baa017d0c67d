//! Where the text model of a checkpoint lies, alone or beside towers for images and sound.

use mlxcel_sdk::prelude::*;

/// What lies beside the text model in published files. Without an image or a sound it takes no part.
const BESIDE: [&str; 6] = [
    "vision_tower",
    "audio_tower",
    "multi_modal_projector",
    "embed_vision",
    "embed_audio",
    "vision_embedder",
];

/// The text model and its head: alone, as published beside towers, or under the names that newer
/// versions of transformers use. In a `nested` checkpoint the towers are skipped.
pub(crate) fn find_parts(weights: &Weights, nested: bool) -> (Weights, Weights) {
    if nested {
        for root in [weights.clone(), weights.at("model")] {
            for name in BESIDE {
                root.at(name).ignore_all();
            }
        }
    }
    let outer = weights.at("language_model");
    if outer.exists() {
        return (outer.at("model"), outer.at("lm_head"));
    }
    let root = weights.at("model");
    let inner = root.at("language_model");
    let root = if inner.exists() { inner } else { root };
    (root, weights.at("lm_head"))
}
