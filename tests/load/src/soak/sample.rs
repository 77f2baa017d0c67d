//! What the server holds at one moment, as its process and its metrics tell.

use std::time::Duration;

use crate::error::LoadError;
use crate::http::Target;

/// One look.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sample {
    /// Seconds since the beginning.
    pub at_s: f64,
    /// Resident memory.
    pub rss_bytes: u64,
    /// Open files and sockets.
    pub handles: u64,
    /// Threads of the process.
    pub threads: u64,
    /// Open connections, this one included.
    pub connections: u64,
    /// Requests in steps.
    pub running: u64,
    /// Requests that wait.
    pub waiting: u64,
    /// Pages of the pool that are in use, the prefix cache's included.
    pub pages: u64,
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Requests that the engine began and has not ended.
    pub unfinished: u64,
    /// Tensors that the backend holds; 0 where it does not tell.
    pub tensors: u64,
    /// Tokens generated so far.
    pub tokens: u64,
    /// Whether `/health` answered 200.
    pub is_healthy: bool,
}

impl Sample {
    /// Whether no request is in work.
    pub fn is_at_rest(&self) -> bool {
        self.running == 0 && self.waiting == 0 && self.unfinished == 0 && self.connections <= 1
    }
}

/// Takes a look.
pub fn take(target: &Target, process: u32, at: Duration) -> Result<Sample, LoadError> {
    // Before anything is asked: the connections of this look are not what it is about.
    let handles = count_handles(process)?;
    let page = target.get("/metrics")?;
    let of = |name: &str| series(&page, name);
    let (rss_bytes, threads) = of_status(&read_proc(process, "status")?);
    let started = of("mlxcel_batch_sequences_started_total");
    let ended = of("mlxcel_batch_sequences_completed_total");
    Ok(Sample {
        at_s: at.as_secs_f64(),
        rss_bytes,
        handles,
        threads,
        connections: of("mlxcel_connections") as u64,
        running: of("llamacpp:requests_processing") as u64,
        waiting: of("llamacpp:requests_deferred") as u64,
        pages: of("mlxcel_cache_pool_paged_blocks_live") as u64,
        pool_bytes: of("mlxcel_cache_pool_paged_bytes_reserved") as u64,
        unfinished: (started - ended).max(0.0) as u64,
        tensors: of("mlxcel_engine_live_tensors") as u64,
        tokens: of("mlxcel_completion_tokens_total") as u64,
        is_healthy: target.send("GET", "/health", b"")?.status == 200,
    })
}

/// The sum of all series of a name on a metrics page.
fn series(page: &str, name: &str) -> f64 {
    page.lines()
        .filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let is_it = rest.starts_with(' ') || rest.starts_with('{');
            is_it.then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
        })
        .sum()
}

fn read_proc(process: u32, name: &str) -> Result<String, LoadError> {
    std::fs::read_to_string(format!("/proc/{process}/{name}")).map_err(LoadError::connection(
        "reading the state of the server's process",
    ))
}

fn count_handles(process: u32) -> Result<u64, LoadError> {
    let entries = std::fs::read_dir(format!("/proc/{process}/fd")).map_err(
        LoadError::connection("reading the open files of the server's process"),
    )?;
    Ok(entries.count() as u64)
}

/// Resident bytes and threads.
fn of_status(text: &str) -> (u64, u64) {
    let number = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
            .unwrap_or(0)
    };
    (number("VmRSS:") * 1024, number("Threads:"))
}

/// One line a sample.
pub fn csv(samples: &[Sample]) -> String {
    let mut text = "at_s,rss_bytes,handles,threads,connections,running,waiting,unfinished,pages,pool_bytes,tensors,tokens,healthy\n"
        .to_owned();
    for s in samples {
        text.push_str(&format!(
            "{:.1},{},{},{},{},{},{},{},{},{},{},{},{}\n",
            s.at_s,
            s.rss_bytes,
            s.handles,
            s.threads,
            s.connections,
            s.running,
            s.waiting,
            s.unfinished,
            s.pages,
            s.pool_bytes,
            s.tensors,
            s.tokens,
            u8::from(s.is_healthy)
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_summed_over_labels() {
        let page = "# HELP x y\nx{a=\"1\"} 2\nx{a=\"2\"} 3.5\nxy 7\nx_total 9\n";
        assert_eq!(series(page, "x"), 5.5);
        assert_eq!(series(page, "x_total"), 9.0);
        assert_eq!(series(page, "z"), 0.0);
    }

    #[test]
    fn a_process_status_is_read() {
        let status = "Name:\tx\nVmHWM:\t 20 kB\nVmRSS:\t   12 kB\nThreads:\t7\n";
        assert_eq!(of_status(status), (12 * 1024, 7));
    }

    #[test]
    fn a_line_of_csv_has_as_many_fields_as_the_head() {
        let text = csv(&[Sample::default()]);
        let fields: Vec<usize> = text.lines().map(|line| line.split(',').count()).collect();
        assert_eq!(fields, [13, 13]);
    }
}
