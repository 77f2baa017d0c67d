//! NVIDIA's run-time compiler: kernels are compiled for the device that is there, once a process.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::ffi::CString;
use std::sync::OnceLock;

use mlxcel_abi::{AbiError, Result, status};

use crate::library::entry_points;

type Program = *mut c_void;

/// The releases of CUDA that MLX is built for, newest first.
const NAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];

entry_points! {
    Compiler {
        create = "nvrtcCreateProgram"(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
        destroy = "nvrtcDestroyProgram"(*mut Program);
        compile = "nvrtcCompileProgram"(Program, c_int, *const *const c_char);
        code_size = "nvrtcGetCUBINSize"(Program, *mut usize);
        code = "nvrtcGetCUBIN"(Program, *mut c_char);
        log_size = "nvrtcGetProgramLogSize"(Program, *mut usize);
        log = "nvrtcGetProgramLog"(Program, *mut c_char);
    }
}

fn get() -> Result<&'static Compiler> {
    static FOUND: OnceLock<core::result::Result<Compiler, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| Compiler::open(&NAMES));
    found.as_ref().map_err(|problem| {
        AbiError::new(
            status::UNAVAILABLE,
            format!("CUDA's run-time compiler is not there: {problem}"),
        )
    })
}

/// Whether there is a compiler.
#[cfg(test)]
pub(crate) fn is_there() -> bool {
    get().is_ok()
}

/// The program under compilation, which ends with this.
struct Open<'a> {
    compiler: &'a Compiler,
    program: Program,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `create`, ended once.
        unsafe { (self.compiler.destroy)(&raw mut self.program) };
    }
}

/// Machine code for `target` (`sm_90` is compute capability 9.0).
pub(crate) fn compile(source: &str, target: &str, defines: &[String]) -> Result<Vec<u8>> {
    let compiler = get()?;
    let text = |text: &str| {
        CString::new(text).map_err(|_| AbiError::internal("a kernel's text has a zero byte"))
    };
    let source = text(source)?;
    let mut options = vec![
        text(&format!("--gpu-architecture={target}"))?,
        text("--std=c++17")?,
        text("-default-device")?,
    ];
    for define in defines {
        options.push(text(&format!("-D{define}"))?);
    }
    let mut open = Open {
        compiler,
        program: core::ptr::null_mut(),
    };
    // SAFETY: texts end with zero and live through the calls; sizes are asked for before buffers are made.
    unsafe {
        let code = (compiler.create)(
            &raw mut open.program,
            source.as_ptr(),
            c"kernel.cu".as_ptr(),
            0,
            core::ptr::null(),
            core::ptr::null(),
        );
        checked("nvrtcCreateProgram", code)?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let code = (compiler.compile)(open.program, pointers.len() as c_int, pointers.as_ptr());
        if code != 0 {
            let mut size = 0;
            (compiler.log_size)(open.program, &raw mut size);
            let mut log = vec![0_u8; size + 1];
            (compiler.log)(open.program, log.as_mut_ptr().cast());
            let log = CStr::from_bytes_until_nul(&log).unwrap_or_default();
            return Err(AbiError::internal(format!(
                "a kernel does not compile: {}",
                log.to_string_lossy()
            )));
        }
        let mut size = 0;
        checked(
            "nvrtcGetCUBINSize",
            (compiler.code_size)(open.program, &raw mut size),
        )?;
        let mut image = vec![0_u8; size];
        checked(
            "nvrtcGetCUBIN",
            (compiler.code)(open.program, image.as_mut_ptr().cast()),
        )?;
        Ok(image)
    }
}

fn checked(what: &str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(AbiError::internal(format!("{what}: error {code}")))
}
