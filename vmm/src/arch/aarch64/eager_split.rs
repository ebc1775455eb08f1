// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Splitting blocks ahead (`KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE`, since Linux 6.5).
//!
//! Where dirty logging begins, or a part of the log is cleared, a kernel told so splits the blocks it
//! finds into pages at once, a chunk of tables at a time, instead of one for each fault of a vCPU that
//! writes. The chunk is one of the block sizes of stage 2; the kernel takes it only before the VM has
//! memory.

use granule_types::units::Bytes;
use kvm_bindings::{
    KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES, kvm_enable_cap,
};
use kvm_ioctls::VmFd;
use thiserror::Error;

use crate::kvm::{KvmError, ioctls::VmExt as _};

/// Why blocks are not split ahead.
#[derive(Debug, Error)]
pub enum EagerSplitError {
    /// The kernel cannot.
    #[error(
        "this host's KVM does not split blocks ahead (KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE came with \
         Linux 6.5): leave --eager-split out"
    )]
    Unknown,
    /// It has no blocks of this size.
    #[error("--eager-split {asked}: this host's stage 2 has blocks of {offered}")]
    Size {
        /// What was asked for.
        asked: Bytes,
        /// The sizes that there are.
        offered: String,
    },
    /// It refuses.
    #[error(transparent)]
    Kvm(#[from] KvmError),
}

/// Has the kernel split blocks of a VM ahead, in chunks of `chunk`; before it has memory.
///
/// # Errors
/// The kernel cannot, or not in chunks of this size.
pub fn enable(vm: &VmFd, chunk: Bytes) -> Result<(), EagerSplitError> {
    let offered = vm.check_extension_raw(KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES.into());
    check(chunk, u64::try_from(offered).unwrap_or(0))?;
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE,
        ..kvm_enable_cap::default()
    };
    cap.args[0] = chunk.0;
    vm.enable_capability(&cap)
        .map_err(|error| KvmError::call("having blocks split ahead (KVM_ENABLE_CAP)", error))?;
    Ok(())
}

/// Checks a size against those that the kernel offers, a bit each.
fn check(asked: Bytes, offered: u64) -> Result<(), EagerSplitError> {
    if offered == 0 {
        return Err(EagerSplitError::Unknown);
    }
    if asked.0.is_power_of_two() && offered & asked.0 != 0 {
        return Ok(());
    }
    let sizes = (0..u64::BITS).map(|bit| 1 << bit);
    let sizes: Vec<String> = sizes
        .filter(|size| offered & size != 0)
        .map(|size| Bytes(size).to_string())
        .collect();
    Err(EagerSplitError::Size {
        asked,
        offered: sizes.join(", "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunk_is_a_block_size_of_the_host() {
        let offered = Bytes::gib(1).0 | Bytes::mib(2).0 | Bytes::kib(4).0;

        let wrong = check(Bytes::mib(4), offered).unwrap_err();
        let none = check(Bytes::mib(3), offered);

        assert!(check(Bytes::mib(2), offered).is_ok());
        assert!(
            wrong.to_string().ends_with("blocks of 4K, 2M, 1G"),
            "{wrong}"
        );
        assert!(none.is_err());
        assert!(matches!(
            check(Bytes::mib(2), 0),
            Err(EagerSplitError::Unknown)
        ));
    }
}
