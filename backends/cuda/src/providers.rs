//! Where libraries come from that MLX for CUDA needs: part of this plugin's record, which the host reads when the plugin cannot be
//! opened (`docs/ABI.md`). Names of packages and their versions are those that MLX's own wheels ask for.

/// Further keys of the record. The driver's functions go on with a capital letter: `cu` alone would take `cudaMalloc` and
/// `curl_easy_init` for its own.
pub(crate) const EXTRA: &str = concat!(
    r#","mlx_version":"0.32.4","providers":["#,
    r#"{"name":"NVIDIA's driver","libraries":["libcuda.so.1"],"#,
    r#""symbols":["cuA","cuB","cuC","cuD","cuE","cuF","cuG","cuH","cuI","cuJ","cuK","cuL","cuM","#,
    r#""cuN","cuO","cuP","cuQ","cuR","cuS","cuT","cuU","cuV","cuW","cuX","cuY","cuZ"],"#,
    r#""get":"install it on the machine; a container has it when it is started with the devices, as with docker run --gpus all"},"#,
    r#"{"name":"NVIDIA's packages for CUDA 13","#,
    r#""libraries":["libcublasLt.so.13","libcublas.so.13","libcudnn.so.9","libcufft.so.12","libcusolver.so.12","libcusparse.so.12","libnvJitLink.so.13","libnvrtc.so.13","libnccl.so.2"],"#,
    r#""symbols":["cublas","cudnn","cufft","cusolver","cusparse","nvrtc","nvJitLink","nccl"],"#,
    r#""get":"python3 -m pip install --upgrade --target {folder} nvidia-cublas~=13.0 nvidia-cuda-nvrtc~=13.0 nvidia-cuda-runtime~=13.0 nvidia-cudnn-cu13~=9.0 nvidia-cufft~=12.0 nvidia-cusolver~=12.0 nvidia-nccl-cu13"},"#,
    r#"{"name":"NVIDIA's packages for CUDA 12","#,
    r#""libraries":["libcublasLt.so.12","libcublas.so.12","libcudnn.so.9","libcufft.so.11","libcusolver.so.11","libcusparse.so.12","libnvJitLink.so.12","libnvrtc.so.12","libnccl.so.2"],"#,
    r#""symbols":["cublas","cudnn","cufft","cusolver","cusparse","nvrtc","nvJitLink","nccl"],"#,
    r#""get":"python3 -m pip install --upgrade --target {folder} nvidia-cublas-cu12~=12.9.0 nvidia-cuda-nvrtc-cu12~=12.9.0 nvidia-cuda-runtime-cu12~=12.9.0 nvidia-cudnn-cu12~=9.0 nvidia-cufft-cu12~=11.4.0 nvidia-cusolver-cu12~=11.7.0 nvidia-nccl-cu12"},"#,
    r#"{"name":"this plugin's package","libraries":["libmlx.so"],"#,
    r#""get":"copy the whole folder, with mlx beside the plugin's file"}]"#,
);

#[cfg(test)]
mod tests {
    use mlxcel_backend_mlx::serde_json::{self, Value};

    #[test]
    fn the_keys_are_json_and_every_provider_says_how_to_get_its_libraries() {
        let record: Value = serde_json::from_str(&format!("{{{}}}", &super::EXTRA[1..])).unwrap();
        let providers = record["providers"].as_array().unwrap();
        assert_eq!(providers.len(), 4);
        for provider in providers {
            let (name, get) = (&provider["name"], &provider["get"]);
            assert!(name.is_string() && get.is_string(), "{provider}");
            assert!(!provider["libraries"].as_array().unwrap().is_empty());
        }
    }

    /// Names of those whose functions may be called so.
    fn origins(symbol: &str) -> Vec<String> {
        let record: Value = serde_json::from_str(&format!("{{{}}}", &super::EXTRA[1..])).unwrap();
        let providers = record["providers"].as_array().unwrap().iter();
        let brings = |provider: &&Value| {
            let beginnings = provider["symbols"].as_array().into_iter().flatten();
            let mut beginnings = beginnings.filter_map(Value::as_str);
            beginnings.any(|beginning| symbol.starts_with(beginning))
        };
        let names = providers
            .filter(brings)
            .filter_map(|one| one["name"].as_str());
        names.map(str::to_owned).collect()
    }

    #[test]
    fn functions_are_taken_for_those_of_who_brings_them() {
        for symbol in ["cuInit", "cuMemAlloc_v2", "cuTensorMapEncodeTiled"] {
            assert_eq!(origins(symbol), ["NVIDIA's driver"], "{symbol}");
        }
        let packages = [
            "NVIDIA's packages for CUDA 13",
            "NVIDIA's packages for CUDA 12",
        ];
        for symbol in ["cublasLtMatmul", "cudnnCreate", "nvrtcVersion", "ncclSend"] {
            assert_eq!(origins(symbol), packages, "{symbol}");
        }
        for symbol in ["curl_easy_init", "cudaMalloc", "cuserid"] {
            assert!(origins(symbol).is_empty(), "{symbol}");
        }
    }
}
