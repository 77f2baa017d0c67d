//! The builds of MLX that can be asked for, and how they are named on the command line.

/// A build of MLX.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Backend {
    Cpu,
    Cuda13,
    Cuda12,
    Metal,
}

/// What `--backend` takes, as help and errors tell it.
pub const NAMES: &str = "cpu, cuda (= cuda13), cuda13, cuda12 or metal";
/// Likewise where only NVIDIA's are of use.
pub const CUDA_NAMES: &str = "cuda (= cuda13), cuda13 or cuda12";

impl Backend {
    pub const ALL: [Backend; 4] = [
        Backend::Cpu,
        Backend::Cuda13,
        Backend::Cuda12,
        Backend::Metal,
    ];

    /// As `--backend`, `mlx.toml` and `target/mlx` spell it.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Cpu => "cpu",
            Backend::Cuda13 => "cuda13",
            Backend::Cuda12 => "cuda12",
            Backend::Metal => "metal",
        }
    }

    /// The folder under `backends/` whose crate is built against this MLX.
    pub fn device(self) -> &'static str {
        match self {
            Backend::Cpu => "cpu",
            Backend::Cuda13 | Backend::Cuda12 => "cuda",
            Backend::Metal => "metal",
        }
    }

    pub fn is_cuda(self) -> bool {
        self.device() == "cuda"
    }

    /// For the command line.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == "cuda" {
            return Ok(Backend::Cuda13);
        }
        if text == "rocm" {
            return Err(
                "there is no pre-built MLX for ROCm to fetch or to pack: backends/rocm/README.md tells how to build it from source"
                    .to_owned(),
            );
        }
        Backend::ALL
            .into_iter()
            .find(|backend| backend.name() == text)
            .ok_or_else(|| format!("expected {NAMES}"))
    }

    /// For commands that are about NVIDIA's devices alone.
    pub fn parse_cuda(text: &str) -> Result<Self, String> {
        Backend::parse(text)
            .ok()
            .filter(|backend| backend.is_cuda())
            .ok_or_else(|| {
                format!("expected {CUDA_NAMES}: this checks and measures the CUDA backend")
            })
    }
}

impl std::fmt::Display for Backend {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_taken_and_told() {
        for backend in Backend::ALL {
            assert_eq!(Backend::parse(backend.name()), Ok(backend));
            assert!(NAMES.contains(backend.name()));
        }
        assert_eq!(Backend::parse("cuda"), Ok(Backend::Cuda13));
        let error = Backend::parse("gpu").expect_err("is none");
        assert!(error.contains("cuda (= cuda13)"), "{error}");
        let error = Backend::parse("rocm").expect_err("is built from source");
        assert!(error.contains("backends/rocm/README.md"), "{error}");
    }

    #[test]
    fn a_cuda_command_takes_cuda_alone() {
        assert_eq!(Backend::parse_cuda("cuda"), Ok(Backend::Cuda13));
        assert_eq!(Backend::parse_cuda("cuda12"), Ok(Backend::Cuda12));
        for name in ["cpu", "metal", "rocm", ""] {
            let error = Backend::parse_cuda(name).expect_err("no CUDA");
            assert!(error.contains(CUDA_NAMES), "{error}");
        }
    }
}
