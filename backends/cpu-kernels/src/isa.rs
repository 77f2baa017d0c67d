//! Choice of the instruction set, once per process.

use std::sync::OnceLock;

/// Instruction sets that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Whatever the compiler's target has.
    Portable,
    /// NEON, which every aarch64 has.
    Neon,
    /// NEON with the `dotprod` extension.
    NeonDot,
    /// AVX2, FMA, F16C, BMI2.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX-512 with VNNI.
    Avx512Vnni,
}

impl Isa {
    /// Every set this build knows, weakest first.
    pub const ALL: [Isa; 6] = [
        Isa::Portable,
        Isa::Neon,
        Isa::NeonDot,
        Isa::Avx2,
        Isa::Avx512,
        Isa::Avx512Vnni,
    ];

    /// Name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Neon => "neon",
            Isa::NeonDot => "neon-dotprod",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vnni => "avx512-vnni",
        }
    }

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => {
                Isa::Neon.is_available() && std::arch::is_aarch64_feature_detected!("dotprod")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                std::arch::is_x86_feature_detected!("avx2")
                    && std::arch::is_x86_feature_detected!("fma")
                    && std::arch::is_x86_feature_detected!("f16c")
                    && std::arch::is_x86_feature_detected!("bmi2")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512dq")
                    && std::arch::is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => {
                Isa::Avx512.is_available() && std::arch::is_x86_feature_detected!("avx512vnni")
            }
            #[allow(unreachable_patterns, reason = "sets of other processors")]
            _ => false,
        }
    }

    /// The best one of this CPU.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            Isa::ALL
                .into_iter()
                .rev()
                .find(|isa| isa.is_available())
                .unwrap_or(Isa::Portable)
        })
    }
}

/// Defines `unsafe fn $name[generics](isa, args..)` that runs `$kernel::<S, generics..>(args..)`
/// compiled for `isa`. Every instance is a function of its own: one function that inlined them all
/// would take minutes to compile.
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis unsafe fn $name:ident $([$($generic:tt)*][$($use:tt)*])? ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? = $kernel:ident) => {
        $(#[$meta])*
        $vis unsafe fn $name $(<$($generic)*>)? (isa: $crate::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2")]
            unsafe fn avx2 $(<$($generic)*>)? ($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: this function enables the set; pointers are the caller's business.
                unsafe { $kernel::<$crate::simd::avx2::Avx2 $(, $($use)*)?>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
            unsafe fn avx512 $(<$($generic)*>)? ($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: as above.
                unsafe { $kernel::<$crate::simd::avx512::Avx512 $(, $($use)*)?>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon")]
            unsafe fn neon $(<$($generic)*>)? ($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: as above.
                unsafe { $kernel::<$crate::simd::neon::Neon $(, $($use)*)?>($($arg),*) }
            }
            // SAFETY: the caller passes an instruction set that the CPU has.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    $crate::Isa::Avx512 | $crate::Isa::Avx512Vnni => avx512 $(::<$($use)*>)? ($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::Isa::Avx2 => avx2 $(::<$($use)*>)? ($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    $crate::Isa::Neon | $crate::Isa::NeonDot => neon $(::<$($use)*>)? ($($arg),*),
                    _ => $kernel::<$crate::simd::scalar::Scalar8 $(, $($use)*)?>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use dispatch;

/// As [`dispatch`] for kernels over [`crate::simd::bytes::Bytes`]. AVX-512 without VNNI takes the
/// kernels of AVX2.
macro_rules! dispatch_bytes {
    ($(#[$meta:meta])* $vis:vis unsafe fn $name:ident $([$($generic:tt)*][$($use:tt)*])? ($($arg:ident : $ty:ty),* $(,)?) = $kernel:ident) => {
        $(#[$meta])*
        $vis unsafe fn $name $(<$($generic)*>)? (isa: $crate::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2")]
            unsafe fn avx2 $(<$($generic)*>)? ($($arg: $ty),*) {
                // SAFETY: this function enables the set; pointers are the caller's business.
                unsafe { $kernel::<$crate::simd::bytes::Avx2Bytes $(, $($use)*)?>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
            unsafe fn avx512_vnni $(<$($generic)*>)? ($($arg: $ty),*) {
                // SAFETY: as above.
                unsafe { $kernel::<$crate::simd::bytes::Avx512VnniBytes $(, $($use)*)?>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon")]
            unsafe fn neon $(<$($generic)*>)? ($($arg: $ty),*) {
                // SAFETY: as above.
                unsafe { $kernel::<$crate::simd::bytes::NeonBytes $(, $($use)*)?>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,dotprod")]
            unsafe fn neon_dot $(<$($generic)*>)? ($($arg: $ty),*) {
                // SAFETY: as above.
                unsafe { $kernel::<$crate::simd::bytes::NeonDotBytes $(, $($use)*)?>($($arg),*) }
            }
            // SAFETY: the caller passes an instruction set that the CPU has.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    $crate::Isa::Avx512Vnni => avx512_vnni $(::<$($use)*>)? ($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::Isa::Avx512 | $crate::Isa::Avx2 => avx2 $(::<$($use)*>)? ($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    $crate::Isa::Neon => neon $(::<$($use)*>)? ($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    $crate::Isa::NeonDot => neon_dot $(::<$($use)*>)? ($($arg),*),
                    _ => $kernel::<$crate::simd::bytes::PortableBytes $(, $($use)*)?>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use dispatch_bytes;
