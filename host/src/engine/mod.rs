//! The engine: a loaded model, its caches and the thread that owns them.
//!
//! Steps are packed and ragged from the start (`pack`): a step holds rows of any number of
//! sequences, and everything that varies between steps is in device arrays. It plans from the
//! family's description (`desc`) and knows no architecture.

mod active;
pub mod batch;
pub mod bucket;
mod cross;
pub mod desc;
mod detect;
mod encoder;
mod entry;
pub mod error;
pub mod estimate;
mod figures;
mod fingerprint;
mod flight;
mod forms;
mod kv_types;
pub mod load;
mod pace;
pub mod pack;
pub mod pages;
mod part;
mod pool;
mod prefix;
mod prefix_disk;
pub mod queue;
mod ranks;
pub mod request;
mod room;
pub mod runner;
pub mod schedule;
pub mod sequence;
mod state_slots;
mod states;
mod thread;
mod weight_source;

pub use desc::{CacheDesc, EncoderDesc, ModelDesc, StateDesc};
pub use detect::{OpenedModel, open_model};
pub use encoder::Features;
pub use error::EngineError;
pub use figures::EngineFigures;
pub use flight::Lookahead;
pub use forms::checkpoint_for;
pub use kv_types::{KvType, KvTypes};
pub use load::{
    EngineFacts, LoadOptions, Precision, PrefixOptions, check_options, preferred_dtype,
    start_engine,
};
pub use prefix::{PrefixCache, PrefixLimits, PrefixStats};
pub use prefix_disk::{DiskOptions, DiskStats};
pub use ranks::{Failure, RANK_COMMAND, RankPlan, rank_main};
pub use request::{CancelToken, Event, EventSink, FinishReason, GenerateRequest, GenerateStats};
pub use room::check_room;
pub use thread::{EngineHandle, EngineHealth, GenerateStream};
