// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What must hold besides the times: the backing asked for, a complete dirty log, right contents.

use super::{error::HarnessError, tasks::Written};
use crate::machine::{Machine, Region, Task};
use granule_types::{backing::Backing, record::Obtained, units::GuestAddress};

/// The whole region is resident in pages of the backing's size.
pub(super) fn backing(
    asked: Backing,
    region: &Region,
    obtained: &Obtained,
) -> Result<(), HarnessError> {
    let whole = [(region.backing_page.0, region.size.0)];
    let there = obtained
        .resident
        .iter()
        .map(|(page, bytes)| (*page, *bytes));
    if there.filter(|(_, bytes)| *bytes > 0).eq(whole) {
        return Ok(());
    }
    Err(HarnessError::Backing {
        backing: asked,
        size: region.size,
        page: region.backing_page,
        obtained: obtained.clone(),
    })
}

/// Every page written has its bit; more bits are allowed.
pub(super) fn dirty_log(
    region: &Region,
    written: Written,
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

/// The host reads what the guest wrote.
pub(super) fn contents(machine: &dyn Machine, written: Written) -> Result<(), HarnessError> {
    for address in written.addresses() {
        let found = machine
            .read_u64(address)
            .map_err(|source| HarnessError::Host {
                doing: "reading the region back".to_owned(),
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
