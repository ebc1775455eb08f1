// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Allocates the memory zones of a VM and places them in the guest-physical address space.

use std::sync::Arc;

use granule_types::{backing::Backing, units::Bytes};
use thiserror::Error;

use super::config::MemoryZone;
use crate::{
    arch::layout::{self, AddressOverflow},
    memory::{GuestMemory, GuestRam, HostPages, MemoryError, Plan, RamOptions},
};

/// Error returned when guest memory cannot be allocated.
#[derive(Debug, Error)]
pub enum MemoryZoneError {
    /// A zone cannot be allocated.
    #[error("--memory {index}: {size} of {backing}", index = index + 1)]
    Zone {
        /// Index of the zone, from 0.
        index: usize,
        /// Size of the zone.
        size: Bytes,
        /// Backing of the zone.
        backing: Backing,
        /// The error.
        #[source]
        source: MemoryError,
    },
    /// The memory map cannot be created.
    #[error(transparent)]
    Map(#[from] MemoryError),
    /// The zones exceed the address space.
    #[error(transparent)]
    Addresses(#[from] AddressOverflow),
}

/// The memory of a VM.
#[derive(Debug)]
pub struct VmMemory {
    /// The zones in the order of the configuration, which is that of their addresses.
    pub zones: Vec<Arc<GuestRam>>,
    /// Memory map of all zones, for devices.
    pub map: GuestMemory,
}

/// Allocates memory zones.
///
/// # Errors
/// [`MemoryZoneError`], which names the zone and what to do.
pub fn allocate(zones: &[MemoryZone]) -> Result<VmMemory, MemoryZoneError> {
    let host = HostPages::of_this_host()?;
    let failed = |index: usize, zone: &MemoryZone| {
        let (size, backing) = (zone.size, zone.backing);
        move |source| MemoryZoneError::Zone { index, size, backing, source }
    };
    let mut plans = Vec::new();
    for (index, zone) in zones.iter().enumerate() {
        let plan = Plan::new(zone.backing, &host).map_err(failed(index, zone))?;
        let size = zone.size.checked_align_up(plan.page()).ok_or(AddressOverflow)?;
        plans.push((plan, size));
    }
    let starts = layout::place_memory(plans.iter().zip(zones).map(|((plan, size), zone)| {
        let align = zone.align.map_or(plan.page(), |align| align.max(plan.page()));
        (*size, align)
    }))?;
    let mut rams = Vec::new();
    for (index, ((zone, start), (plan, size))) in zones.iter().zip(starts).zip(plans).enumerate() {
        let options = RamOptions {
            prefault: zone.prefault,
            align: zone.align,
            node: zone.node,
            parallel: true,
        };
        let ram = GuestRam::with_options(plan, &host, start, size, options);
        rams.push(ram.map_err(failed(index, zone))?);
    }
    let map = GuestMemory::new(rams.clone())?;
    Ok(VmMemory { zones: rams, map })
}
