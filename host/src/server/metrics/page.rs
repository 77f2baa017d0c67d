//! The metrics page: llama-server's series under its names, and our own.

use std::fmt::{Display, Write};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::engine::{DiskStats, EngineFigures, EngineHealth};

use super::{Metrics, Outcome};

/// State of the engine and of the queue at the time of the scrape.
#[derive(Debug, Clone, Copy)]
pub struct Scrape<'a> {
    /// Name of the model, a label.
    pub model: &'a str,
    /// Counters of the engine.
    pub figures: EngineFigures,
    /// State of the engine.
    pub health: EngineHealth,
    /// Answers at a time.
    pub parallel: usize,
    /// Bytes of one cached page.
    pub page_bytes: usize,
    /// Open connections.
    pub connections: usize,
    /// Connections that were closed for others.
    pub displaced_connections: u64,
}

struct Page {
    text: String,
    labels: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a text cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn llama(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        let name = format!("llamacpp:{name}");
        self.head(&name, kind, help);
        let _ = writeln!(self.text, "{name} {value}");
    }

    fn own(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        let name = format!("mlxcel_{name}");
        self.head(&name, kind, help);
        let _ = writeln!(self.text, "{name}{{{}}} {value}", self.labels);
    }
}

fn rate(tokens: u64, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 {
        tokens as f64 / seconds
    } else {
        0.0
    }
}

/// Writes the page.
pub fn page(metrics: &Metrics, scrape: &Scrape<'_>) -> String {
    let model = scrape
        .model
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', " ");
    let mut page = Page {
        text: String::new(),
        labels: format!("model=\"{model}\""),
    };
    llama(&mut page, metrics, scrape);
    requests(&mut page, metrics, scrape);
    engine(&mut page, &scrape.figures);
    caches(&mut page, scrape);
    let Page { mut text, labels } = page;
    metrics.first_token.write(
        &mut text,
        "mlxcel_time_to_first_token_seconds",
        "From the request to its first token.",
        &labels,
    );
    metrics.inter_token.write(
        &mut text,
        "mlxcel_inter_token_latency_seconds",
        "From one token of an answer to the next.",
        &labels,
    );
    metrics.request.write(
        &mut text,
        "mlxcel_request_duration_seconds",
        "From the request to the end of its answer.",
        &labels,
    );
    text
}

fn seconds(counter: &AtomicU64) -> f64 {
    Duration::from_micros(counter.load(Ordering::Relaxed)).as_secs_f64()
}

fn llama(page: &mut Page, metrics: &Metrics, scrape: &Scrape<'_>) {
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (figures, window) = (&scrape.figures, metrics.take_window());
    let busy = if figures.steps > 0 {
        figures.busy_sequences as f64 / figures.steps as f64
    } else {
        0.0
    };
    page.llama(
        "prompt_tokens_total",
        "counter",
        "Number of prompt tokens processed.",
        count(&metrics.prompt_tokens),
    );
    page.llama(
        "prompt_tokens_cached_total",
        "counter",
        "Number of prompt tokens taken from the cache.",
        count(&metrics.cached_tokens),
    );
    page.llama(
        "prompt_seconds_total",
        "counter",
        "Prompt process time",
        seconds(&metrics.prompt_us),
    );
    page.llama(
        "tokens_predicted_total",
        "counter",
        "Number of generation tokens processed.",
        count(&metrics.predicted_tokens),
    );
    page.llama(
        "tokens_predicted_seconds_total",
        "counter",
        "Predict process time",
        seconds(&metrics.predicted_us),
    );
    page.llama(
        "n_decode_total",
        "counter",
        "Total number of steps of the engine.",
        figures.steps,
    );
    page.llama(
        "n_tokens_max",
        "counter",
        "Largest observed n_tokens.",
        figures.longest_tokens,
    );
    page.llama(
        "n_busy_slots_per_decode",
        "gauge",
        "Average number of busy slots per step.",
        busy,
    );
    page.llama(
        "prompt_tokens_seconds",
        "gauge",
        "Prompt throughput in tokens/s since the last scrape.",
        rate(window.prompt_tokens, window.prompt),
    );
    page.llama(
        "predicted_tokens_seconds",
        "gauge",
        "Generation throughput in tokens/s since the last scrape.",
        rate(window.predicted_tokens, window.predicted),
    );
    page.llama(
        "requests_processing",
        "gauge",
        "Number of requests processing.",
        scrape.health.running,
    );
    page.llama(
        "requests_deferred",
        "gauge",
        "Number of requests deferred.",
        scrape.health.waiting,
    );
}

fn requests(page: &mut Page, metrics: &Metrics, scrape: &Scrape<'_>) {
    let name = "mlxcel_requests_total";
    page.head(
        name,
        "counter",
        "Requests that reached the engine, by how they ended.",
    );
    {
        let outcomes = metrics
            .outcomes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for outcome in [Outcome::Completed, Outcome::Cancelled, Outcome::Failed] {
            let count = outcomes.get(&outcome).copied().unwrap_or_default();
            let _ = writeln!(
                page.text,
                "{name}{{{},outcome=\"{}\"}} {count}",
                page.labels,
                outcome.name()
            );
        }
    }
    let name = "mlxcel_http_responses_total";
    page.head(name, "counter", "Responses by route and status.");
    {
        let responses = metrics
            .responses
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for ((route, status), count) in responses.iter() {
            let _ = writeln!(
                page.text,
                "{name}{{route=\"{route}\",code=\"{status}\"}} {count}"
            );
        }
    }
    let free = scrape.parallel.saturating_sub(scrape.health.running);
    page.own(
        "requests_refused_total",
        "counter",
        "Requests that found no room in the queue.",
        metrics.refused_full.load(Ordering::Relaxed),
    );
    page.own(
        "prompt_tokens_total",
        "counter",
        "Tokens of prompts, cached ones included.",
        {
            metrics.prompt_tokens.load(Ordering::Relaxed)
                + metrics.cached_tokens.load(Ordering::Relaxed)
        },
    );
    page.own(
        "completion_tokens_total",
        "counter",
        "Tokens generated.",
        metrics.predicted_tokens.load(Ordering::Relaxed),
    );
    page.own(
        "generation_time_seconds_total",
        "counter",
        "Time from first tokens to last ones.",
        seconds(&metrics.predicted_us),
    );
    page.own(
        "slots_total",
        "gauge",
        "Answers at a time.",
        scrape.parallel,
    );
    page.own("slots_available", "gauge", "Of them, free.", free);
    page.own(
        "queue_depth",
        "gauge",
        "Requests that wait.",
        scrape.health.waiting,
    );
    page.own(
        "connections",
        "gauge",
        "Open connections.",
        scrape.connections,
    );
    page.own(
        "connections_displaced_total",
        "counter",
        "Silent connections that were closed to make room for others.",
        scrape.displaced_connections,
    );
    page.own(
        "engine_up",
        "gauge",
        "Whether the engine's thread runs.",
        u8::from(scrape.health.is_alive),
    );
    page.own(
        "engine_live_tensors",
        "gauge",
        "Tensors that the backend holds, 0 where it does not count them.",
        scrape.figures.live_tensors,
    );
    let age = scrape.health.step_age.unwrap_or_default().as_secs_f64();
    page.own(
        "engine_step_age_seconds",
        "gauge",
        "How long the current step has taken.",
        age,
    );
}

fn engine(page: &mut Page, figures: &EngineFigures) {
    page.own(
        "batch_sequences_started_total",
        "counter",
        "Requests that began.",
        figures.started,
    );
    page.own(
        "batch_sequences_completed_total",
        "counter",
        "Requests that ended, however they did.",
        figures.ended,
    );
    page.own(
        "batch_prefill_tokens_total",
        "counter",
        "Rows of prompts in steps.",
        figures.prefill_rows,
    );
    page.own(
        "batch_decode_tokens_total",
        "counter",
        "Rows of answers in steps.",
        figures.decode_rows,
    );
    page.own("batch_steps_total", "counter", "Steps.", figures.steps);
    page.own(
        "batch_mixed_steps_total",
        "counter",
        "Steps with rows of both.",
        figures.mixed_steps,
    );
    page.own(
        "batch_expired_total",
        "counter",
        "Requests whose time was over.",
        figures.expired,
    );
    page.own(
        "batch_failed_steps_total",
        "counter",
        "Steps that failed.",
        figures.failed_steps,
    );
    page.own(
        "batch_preemptions_total",
        "counter",
        "Times that a request stepped back for lack of room.",
        figures.preemptions,
    );
}

fn caches(page: &mut Page, scrape: &Scrape<'_>) {
    let figures = &scrape.figures;
    page.own(
        "cache_pool_paged_block_size",
        "gauge",
        "Positions in a page.",
        figures.page_tokens,
    );
    page.own(
        "cache_pool_paged_blocks_live",
        "gauge",
        "Pages in use.",
        figures.pages_in_use,
    );
    page.own(
        "cache_pool_paged_blocks_free",
        "gauge",
        "Pages free.",
        figures.pages_total.saturating_sub(figures.pages_in_use),
    );
    page.own(
        "cache_pool_paged_block_budget",
        "gauge",
        "Pages there may be.",
        figures.pages_total,
    );
    page.own(
        "cache_pool_paged_bytes_reserved",
        "gauge",
        "Bytes of keys and values on the device.",
        figures.kv_bytes,
    );
    page.own(
        "cache_pool_paged_bytes_in_use",
        "gauge",
        "Bytes of pages in use.",
        figures.pages_in_use * scrape.page_bytes,
    );
    page.own(
        "prompt_cache_hits_total",
        "counter",
        "Prompts with a cached beginning.",
        figures.prefix.hits,
    );
    page.own(
        "prompt_cache_misses_total",
        "counter",
        "Prompts without.",
        figures.prefix.misses,
    );
    page.own(
        "prompt_cache_prefix_tokens_reused_total",
        "counter",
        "Tokens not computed again.",
        figures.prefix.reused_tokens,
    );
    let name = "mlxcel_prompt_cache_evictions_total";
    page.head(name, "counter", "Pages let go, by why.");
    for (reason, count) in [
        ("lru", figures.prefix.evicted_pages),
        ("ttl", figures.prefix.expired_pages),
        ("capacity", figures.prefix.capped_pages),
    ] {
        let labels = &page.labels;
        let _ = writeln!(page.text, "{name}{{{labels},reason=\"{reason}\"}} {count}");
    }
    page.own(
        "prompt_cache_entries",
        "gauge",
        "Pages of the prefix cache.",
        figures.prefix_pages,
    );
    page.own(
        "prompt_cache_bytes",
        "gauge",
        "Their bytes.",
        figures.prefix_pages * scrape.page_bytes,
    );
    disk(page, &figures.disk);
}

fn disk(page: &mut Page, disk: &DiskStats) {
    for (name, kind, help, value) in [
        (
            "prompt_cache_disk_pages_read_total",
            "counter",
            "Pages read from the disk.",
            disk.read_pages,
        ),
        (
            "prompt_cache_disk_pages_written_total",
            "counter",
            "Pages written to it.",
            disk.written_pages,
        ),
        (
            "prompt_cache_disk_writes_failed_total",
            "counter",
            "Pages that could not be written.",
            disk.failed_writes,
        ),
        (
            "prompt_cache_disk_files_damaged_total",
            "counter",
            "Files that were not what they should be.",
            disk.damaged_files,
        ),
        (
            "prompt_cache_disk_files_evicted_total",
            "counter",
            "Files deleted to keep the bound.",
            disk.evicted_files,
        ),
        (
            "prompt_cache_disk_files",
            "gauge",
            "Files on the disk.",
            disk.files,
        ),
        (
            "prompt_cache_disk_bytes",
            "gauge",
            "Their bytes.",
            disk.bytes,
        ),
    ] {
        page.own(name, kind, help, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_on_operations_names_every_series_and_no_other() {
        let health = EngineHealth {
            is_alive: true,
            step_age: None,
            running: 0,
            waiting: 0,
        };
        let scrape = Scrape {
            model: "a\"b\\c",
            figures: EngineFigures::default(),
            health,
            parallel: 4,
            page_bytes: 0,
            connections: 0,
            displaced_connections: 0,
        };
        let text = page(&Metrics::default(), &scrape);
        assert!(
            text.contains("mlxcel_slots_total{model=\"a\\\"b\\\\c\"} 4"),
            "{text}"
        );
        let docs = include_str!("../../../../docs/OPERATIONS.md");
        let served: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
            .collect();
        for name in &served {
            assert!(
                docs.contains(&format!("`{name}`")),
                "docs/OPERATIONS.md lacks {name}"
            );
        }
        for name in docs
            .split('`')
            .filter(|word| word.starts_with("llamacpp:") || word.starts_with("mlxcel_"))
        {
            assert!(served.contains(&name), "docs/OPERATIONS.md has {name}");
        }
    }
}
