// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page with a VM's [generation](crate::devices::VmGeneration).

use super::start::Start;
use crate::{
    devices::VmGeneration,
    kvm::{KvmError, read_only_page::ReadOnlyPage},
    random::random_bytes,
};

/// Returns a page with a new generation; `None` for a snapshot of a guest that booted without the
/// device. A guest that cannot notice the restore is logged.
pub fn new_page(start: &Start<'_>) -> Result<Option<ReadOnlyPage>, KvmError> {
    let generation = random_bytes();
    if let Start::Restore(snapshot, _) = start {
        if !snapshot.state.devices.contains_key(VmGeneration::NAME) {
            log::warn!(
                "the guest booted without a VM generation, so it does not notice the restore: reseed \
                 its random number generator (RNDRESEEDCRNG)"
            );
            return Ok(None);
        }
        if generation.is_none() {
            log::warn!(
                "the host's random number generator is not initialised, so the guest may not notice \
                 the restore: reseed its generator (RNDRESEEDCRNG), or restore it again later"
            );
        }
    }
    ReadOnlyPage::new(&generation.unwrap_or_default()).map(Some)
}
