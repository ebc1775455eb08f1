// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks of a run besides its times: page sizes of the backing, dirty bitmap, contents.

use super::{error::HarnessError, tasks::WrittenRange};
use crate::{
    machine::{Machine, Region},
    task::Task,
};
use granule_types::{backing::Backing, record::Obtained, units::GuestAddress};

/// Checks that pages of the backing's size, and no others, back the whole region.
pub(super) fn backing(
    backing: Backing,
    region: &Region,
    obtained: &Obtained,
) -> Result<(), HarnessError> {
    let whole = [(region.backing_page.0, region.size.0)];
    let found = obtained.resident.iter();
    let found = found.map(|(page, bytes)| (*page, *bytes));
    if found.filter(|(_, bytes)| *bytes > 0).eq(whole) {
        return Ok(());
    }
    Err(HarnessError::Backing {
        backing,
        size: region.size,
        page: region.backing_page,
        obtained: obtained.clone(),
    })
}

/// Checks that the dirty bitmap contains every written page; it may contain more.
pub(super) fn dirty_log(
    region: &Region,
    written: WrittenRange,
    log: &[u64],
) -> Result<(), HarnessError> {
    let is_clean = |address: &GuestAddress| {
        let page = (address.0 - region.start.0) / region.host_page.0;
        let word = usize::try_from(page / 64).ok().and_then(|at| log.get(at));
        word.is_none_or(|word| word >> (page % 64) & 1 == 0)
    };
    let mut missing = written.addresses().filter(is_clean);
    let Some(first) = missing.next() else {
        return Ok(());
    };
    Err(HarnessError::DirtyLog {
        missing: 1 + missing.count() as u64,
        written: written.count,
        first,
    })
}

/// Checks that the host reads the values that the guest wrote.
pub(super) fn contents(machine: &dyn Machine, written: WrittenRange) -> Result<(), HarnessError> {
    for address in written.addresses() {
        let found = machine
            .read_u64(address)
            .map_err(|source| HarnessError::Host {
                doing: "reading the region".to_owned(),
                source,
            })?;
        let expected = Task::value_at(written.seed, address);
        if found != expected {
            return Err(HarnessError::Contents {
                address,
                expected,
                found,
            });
        }
    }
    Ok(())
}
