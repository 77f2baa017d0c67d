//! NVIDIA's product of dense matrices (cuBLASLt), which MLX's library brings along, called on this backend's own stream.
//!
//! MLX calls the same library, but a node of its graph for each product: some 60 microseconds of the host with all that is
//! submitted around it, and a gap on the device before it. Constants are those of `cublasLt.h`, the same in CUDA 12 and 13.

use core::ffi::{c_int, c_void};
use core::ptr::{null_mut, without_provenance, without_provenance_mut};
use std::sync::OnceLock;

use mlxcel_abi::{AbiError, Result, status};

use crate::driver::{Driver, Stream};
use crate::library::entry_points;

type Handle = *mut c_void;
type Description = *mut c_void;
type Layout = *mut c_void;
type Preference = *mut c_void;

/// The releases of CUDA that MLX is built for, newest first.
const NAMES: [&str; 2] = ["libcublasLt.so.13", "libcublasLt.so.12"];

/// Memory beside its operands that a product may be given, as NVIDIA recommends for compute capability 9.0.
const WORKSPACE_BYTES: usize = 32 << 20;
/// Largest alignment that ways are chosen by.
const MOST_ALIGNMENT: usize = 256;

const SUCCESS: c_int = 0;
const ALLOC_FAILED: c_int = 3;
/// `CUBLAS_COMPUTE_32F`.
const COMPUTE_F32: c_int = 68;
/// `CUDA_R_32F`, `CUDA_R_16F`, `CUDA_R_16BF`.
const R_F32: c_int = 0;
const R_F16: c_int = 2;
const R_BF16: c_int = 14;
/// `CUBLASLT_MATMUL_DESC_TRANSA` and `CUBLAS_OP_T`.
const TRANSPOSE_A: c_int = 3;
const TRANSPOSED: c_int = 1;
/// Of `cublasLtMatmulPreferenceAttributes_t`.
const MOST_WORKSPACE: c_int = 1;
const REDUCTIONS: c_int = 3;
const ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];
/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`: parts of a sum are added in f32, in memory of their own, so that the result is rounded
/// once and does not depend on which part is done first.
const IN_F32: u32 = 2;

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Found {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

entry_points! {
    Entries {
        create = "cublasLtCreate"(*mut Handle);
        destroy = "cublasLtDestroy"(Handle);
        describe = "cublasLtMatmulDescCreate"(*mut Description, c_int, c_int);
        set_description = "cublasLtMatmulDescSetAttribute"(Description, c_int, *const c_void, usize);
        end_description = "cublasLtMatmulDescDestroy"(Description);
        lay_out = "cublasLtMatrixLayoutCreate"(*mut Layout, c_int, u64, u64, i64);
        end_layout = "cublasLtMatrixLayoutDestroy"(Layout);
        prefer = "cublasLtMatmulPreferenceCreate"(*mut Preference);
        set_preference = "cublasLtMatmulPreferenceSetAttribute"(Preference, c_int, *const c_void, usize);
        end_preference = "cublasLtMatmulPreferenceDestroy"(Preference);
        choose = "cublasLtMatmulAlgoGetHeuristic"(Handle, Description, Layout, Layout, Layout, Layout, Preference, c_int, *mut Found, *mut c_int);
        multiply = "cublasLtMatmul"(Handle, Description, *const c_void, *const c_void, Layout, *const c_void, Layout, *const c_void, *const c_void, Layout, *mut c_void, Layout, *const [u64; 8], *mut c_void, usize, Stream);
    }
}

fn entries() -> Result<&'static Entries> {
    static FOUND: OnceLock<core::result::Result<Entries, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| Entries::open(&NAMES));
    found.as_ref().map_err(|problem| {
        AbiError::new(
            status::UNAVAILABLE,
            format!("cuBLASLt is not there: {problem}"),
        )
    })
}

fn checked(what: &str, code: c_int) -> Result<()> {
    match code {
        SUCCESS => Ok(()),
        ALLOC_FAILED => Err(AbiError::new(
            status::RESOURCE_EXHAUSTED,
            format!("{what}: no memory is left"),
        )),
        _ => Err(AbiError::internal(format!("{what}: status {code}"))),
    }
}

/// `out = x @ w.T`: what a way is chosen by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    /// Of x and the result.
    pub(crate) rows: usize,
    /// Rows of w.
    pub(crate) outputs: usize,
    /// Of x and w.
    pub(crate) inputs: usize,
    /// bf16, else f16.
    pub(crate) is_bf16: bool,
    /// That all operands have at least: a power of two.
    pub(crate) alignment: usize,
}

impl Form {
    /// The alignment that all of these addresses have.
    pub(crate) fn alignment_of(addresses: &[usize]) -> usize {
        let all = addresses.iter().fold(MOST_ALIGNMENT, |all, at| all | at);
        1 << all.trailing_zeros()
    }
}

/// Where a product's operands are on the device: rows without gaps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) x: usize,
    pub(crate) w: usize,
    /// Added to the result, of its form; 0 for nothing.
    pub(crate) residual: usize,
    pub(crate) out: usize,
}

/// The library, for one backend.
pub(crate) struct Blas {
    entries: &'static Entries,
    driver: &'static Driver,
    handle: Handle,
}

impl core::fmt::Debug for Blas {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Blas").finish_non_exhaustive()
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        let _away = self.driver.at_home();
        // SAFETY: made by `create`, ended once.
        unsafe { (self.entries.destroy)(self.handle) };
    }
}

impl Blas {
    /// For the device that the calling thread uses.
    pub(crate) fn open(driver: &'static Driver) -> Result<Self> {
        let entries = entries()?;
        let _away = driver.at_home();
        let mut handle = null_mut();
        // SAFETY: writes one handle.
        checked("cublasLtCreate", unsafe {
            (entries.create)(&raw mut handle)
        })?;
        Ok(Self {
            entries,
            driver,
            handle,
        })
    }

    /// How the library makes a product of this form, or none where it has no way.
    pub(crate) fn way(&self, form: &Form) -> Result<Option<Way>> {
        let _away = self.driver.at_home();
        let mut way = Way {
            entries: self.entries,
            description: null_mut(),
            layouts: [null_mut(); 3],
            algorithm: [0; 8],
            workspace_bytes: 0,
        };
        let element = if form.is_bf16 { R_BF16 } else { R_F16 };
        let (rows, outputs, inputs) = (form.rows, form.outputs, form.inputs);
        // The library has columns one after another: what it sees as w, x and the result are their transposes.
        let shapes = [(inputs, outputs), (inputs, rows), (outputs, rows)];
        // SAFETY: each call writes one handle or reads a value of the size that it says.
        unsafe {
            checked(
                "cublasLtMatmulDescCreate",
                (self.entries.describe)(&raw mut way.description, COMPUTE_F32, R_F32),
            )?;
            checked(
                "cublasLtMatmulDescSetAttribute",
                (self.entries.set_description)(
                    way.description,
                    TRANSPOSE_A,
                    core::ptr::from_ref(&TRANSPOSED).cast(),
                    size_of_val(&TRANSPOSED),
                ),
            )?;
            for (layout, (height, width)) in way.layouts.iter_mut().zip(shapes) {
                checked(
                    "cublasLtMatrixLayoutCreate",
                    (self.entries.lay_out)(
                        layout,
                        element,
                        height as u64,
                        width as u64,
                        height as i64,
                    ),
                )?;
            }
        }
        let found = self.choose(&way, form.alignment)?;
        Ok(found.map(|found| {
            way.algorithm = found.algorithm;
            way.workspace_bytes = found.workspace_bytes;
            way
        }))
    }

    fn choose(&self, way: &Way, alignment: usize) -> Result<Option<Found>> {
        let mut preference = Preferred {
            entries: self.entries,
            preference: null_mut(),
        };
        let mut found = Found::default();
        let mut count = 0;
        let [w, x, out] = way.layouts;
        // SAFETY: as above; there is room for the one result that is asked for.
        let code = unsafe {
            checked(
                "cublasLtMatmulPreferenceCreate",
                (self.entries.prefer)(&raw mut preference.preference),
            )?;
            preference.set(MOST_WORKSPACE, &WORKSPACE_BYTES)?;
            preference.set(REDUCTIONS, &IN_F32)?;
            for attribute in ALIGNMENTS {
                preference.set(attribute, &(alignment as u32))?;
            }
            (self.entries.choose)(
                self.handle,
                way.description,
                w,
                x,
                out,
                out,
                preference.preference,
                1,
                &raw mut found,
                &raw mut count,
            )
        };
        let is_found = code == SUCCESS && count == 1 && found.state == SUCCESS;
        Ok(is_found.then_some(found))
    }

    /// Submits a product. `workspace` has as many bytes as the way says.
    ///
    /// # Safety
    /// The operands are those of the way's form, and aligned as it says. All of it is freed in the stream's order.
    pub(crate) unsafe fn multiply(
        &self,
        way: &Way,
        operands: &Operands,
        workspace: usize,
        stream: Stream,
    ) -> Result<()> {
        let _away = self.driver.at_home();
        let one = 1.0_f32;
        let (beta, residual) = match operands.residual {
            0 => (0.0_f32, operands.out),
            residual => (1.0, residual),
        };
        let [w, x, out] = way.layouts;
        // SAFETY: forwarded to the caller; factors are on the host, as the description says by default.
        let code = unsafe {
            (self.entries.multiply)(
                self.handle,
                way.description,
                (&raw const one).cast(),
                without_provenance(operands.w),
                w,
                without_provenance(operands.x),
                x,
                (&raw const beta).cast(),
                without_provenance(residual),
                out,
                without_provenance_mut(operands.out),
                out,
                &raw const way.algorithm,
                without_provenance_mut(workspace),
                way.workspace_bytes,
                stream,
            )
        };
        checked("cublasLtMatmul", code)
    }
}

/// How the library makes products of one form.
pub(crate) struct Way {
    entries: &'static Entries,
    description: Description,
    /// Of w, x and the result.
    layouts: [Layout; 3],
    algorithm: [u64; 8],
    pub(crate) workspace_bytes: usize,
}

impl core::fmt::Debug for Way {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Way")
            .field("workspace_bytes", &self.workspace_bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        // SAFETY: each was made by its `Create`, or is null, and is ended once.
        unsafe {
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                (self.entries.end_layout)(layout);
            }
            if !self.description.is_null() {
                (self.entries.end_description)(self.description);
            }
        }
    }
}

struct Preferred {
    entries: &'static Entries,
    preference: Preference,
}

impl Preferred {
    /// # Safety
    /// The attribute is of this type.
    unsafe fn set<T>(&self, attribute: c_int, value: &T) -> Result<()> {
        // SAFETY: reads a value of the size that it is told; the type is the caller's to know.
        let code = unsafe {
            (self.entries.set_preference)(
                self.preference,
                attribute,
                core::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        checked("cublasLtMatmulPreferenceSetAttribute", code)
    }
}

impl Drop for Preferred {
    fn drop(&mut self) {
        if !self.preference.is_null() {
            // SAFETY: made by its `Create`, ended once.
            unsafe { (self.entries.end_preference)(self.preference) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alignment_is_what_all_addresses_have() {
        assert_eq!(Form::alignment_of(&[0x1000, 0x2000]), 256);
        assert_eq!(Form::alignment_of(&[0x1000, 0x2040]), 64);
        assert_eq!(Form::alignment_of(&[0x1010, 0x2040]), 16);
        assert_eq!(Form::alignment_of(&[0x1001]), 1);
    }

    #[test]
    fn results_of_a_choice_lie_as_in_the_header() {
        assert_eq!(size_of::<Found>(), 96);
        assert_eq!(core::mem::offset_of!(Found, state), 72);
    }
}
