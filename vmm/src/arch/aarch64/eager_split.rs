// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Eager page splitting (`KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE`, since Linux 6.5).
//!
//! With it, KVM splits blocks into pages when dirty logging starts or part of the log is cleared, one
//! chunk of tables at a time, instead of at each write fault. The chunk is a block size of stage 2. KVM
//! accepts it only before the VM has memslots.

use granule_types::units::Bytes;
use kvm_bindings::{
    KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES, kvm_enable_cap,
};
use kvm_ioctls::VmFd;
use thiserror::Error;

use crate::kvm::{KvmError, ioctls::VmExt as _};

/// Error returned when eager page splitting cannot be enabled.
#[derive(Debug, Error)]
pub enum EagerSplitError {
    /// The kernel lacks the capability.
    #[error(
        "--eager-split: this host's KVM does not support it (KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE needs \
         Linux 6.5): remove the option"
    )]
    Unsupported,
    /// Stage 2 has no blocks of the requested size.
    #[error(
        "--eager-split {requested}: not a block size of this host; expected one of {supported}"
    )]
    Size {
        /// The requested size.
        requested: Bytes,
        /// The supported sizes.
        supported: String,
    },
    /// A KVM call failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
}

/// Enables eager page splitting in chunks of `chunk`; call it before the VM has memslots.
///
/// # Errors
/// The kernel lacks the capability or does not support the chunk size.
pub fn enable(vm: &VmFd, chunk: Bytes) -> Result<(), EagerSplitError> {
    let supported = vm.check_extension_raw(KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES.into());
    check(chunk, u64::try_from(supported).unwrap_or(0))?;
    let mut cap =
        kvm_enable_cap { cap: KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, ..kvm_enable_cap::default() };
    cap.args[0] = chunk.0;
    vm.enable_capability(&cap)
        .map_err(|error| KvmError::call("KVM_ENABLE_CAP (eager split)", error))?;
    Ok(())
}

/// Checks a size against the bitmap of supported sizes.
fn check(requested: Bytes, supported: u64) -> Result<(), EagerSplitError> {
    if supported == 0 {
        return Err(EagerSplitError::Unsupported);
    }
    if requested.0.is_power_of_two() && supported & requested.0 != 0 {
        return Ok(());
    }
    let sizes = (0..u64::BITS).map(|bit| 1 << bit);
    let sizes: Vec<String> =
        sizes.filter(|size| supported & size != 0).map(|size| Bytes(size).to_string()).collect();
    Err(EagerSplitError::Size { requested, supported: sizes.join(", ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunk_must_be_a_block_size_of_the_host() {
        let supported = Bytes::gib(1).0 | Bytes::mib(2).0 | Bytes::kib(4).0;

        let wrong = check(Bytes::mib(4), supported).unwrap_err();
        let none = check(Bytes::mib(3), supported);

        assert!(check(Bytes::mib(2), supported).is_ok());
        assert!(wrong.to_string().ends_with("one of 4K, 2M, 1G"), "{wrong}");
        assert!(none.is_err());
        assert!(matches!(check(Bytes::mib(2), 0), Err(EagerSplitError::Unsupported)));
    }
}
