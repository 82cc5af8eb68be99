//! Which instructions this machine has.

use std::sync::OnceLock;

/// A set of instructions that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 F, BW, VL and VNNI.
    Avx512,
    /// AVX2, FMA and F16C.
    Avx2,
    /// NEON with the dot products of Armv8.2.
    NeonDot,
    /// NEON.
    Neon,
    /// No instructions of a kind: what the compiler makes of plain code.
    Portable,
}

impl Isa {
    /// The best that this machine has; asked once.
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::available()[0])
    }

    /// All that this machine has, best first.
    pub fn available() -> Vec<Self> {
        let all = [
            Self::Avx512,
            Self::Avx2,
            Self::NeonDot,
            Self::Neon,
            Self::Portable,
        ];
        all.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Whether it comes with products of pairs of bfloat16 (`AVX512_BF16`) on this machine.
    pub fn multiplies_bf16(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        let is_there = self == Self::Avx512 && is_x86_feature_detected!("avx512bf16");
        #[cfg(not(target_arch = "x86_64"))]
        let is_there = false;
        is_there
    }

    /// Its name, as `kernel_isa` of the Python package gives it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::NeonDot => "neon_dotprod",
            Self::Neon => "neon",
            Self::Portable => "portable",
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        match self {
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Self::NeonDot | Self::Neon => false,
            Self::Portable => true,
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn is_available(self) -> bool {
        use std::arch::is_aarch64_feature_detected;
        match self {
            Self::Avx512 | Self::Avx2 => false,
            Self::NeonDot => {
                is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod")
            }
            Self::Neon => is_aarch64_feature_detected!("neon"),
            Self::Portable => true,
        }
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn is_available(self) -> bool {
        self == Self::Portable
    }
}
