// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A machine's memory, obtained zone by zone.

use std::sync::Arc;

use granule_types::units::Bytes;
use thiserror::Error;

use super::{
    config::Zone,
    layout::{self, NoAddresses},
};
use crate::memory::{GuestMemory, GuestRam, HostPages, MemoryError, Plan, RamOptions};

/// Why a machine has no memory.
#[derive(Debug, Error)]
pub enum ObtainError {
    /// A zone cannot be had.
    #[error("--memory {index}: {size} of {backing}", index = index + 1)]
    Zone {
        /// Which, counted from 0.
        index: usize,
        /// Its size.
        size: Bytes,
        /// Its backing.
        backing: granule_types::backing::Backing,
        /// Why.
        #[source]
        source: MemoryError,
    },
    /// The pieces cannot be put together.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// There is no place for them.
    #[error(transparent)]
    Addresses(#[from] NoAddresses),
}

/// All of it.
#[derive(Debug)]
pub struct Obtained {
    /// The pieces in the order asked for, which is that of their addresses.
    pub zones: Vec<Arc<GuestRam>>,
    /// All pieces as devices see them.
    pub map: GuestMemory,
}

/// Obtains memory.
///
/// # Errors
/// The host cannot give what was asked for; the error names the zone and says what to do.
pub fn obtain(zones: &[Zone]) -> Result<Obtained, ObtainError> {
    let host = HostPages::of_this_host()?;
    let failed = |index: usize, zone: &Zone| {
        let (size, backing) = (zone.size, zone.backing);
        move |source| ObtainError::Zone {
            index,
            size,
            backing,
            source,
        }
    };
    let mut plans = Vec::new();
    for (index, zone) in zones.iter().enumerate() {
        let plan = Plan::new(zone.backing, &host).map_err(failed(index, zone))?;
        let size = zone.size.checked_align_up(plan.page()).ok_or(NoAddresses)?;
        plans.push((plan, size));
    }
    let places = layout::place_memory(plans.iter().zip(zones).map(|((plan, size), zone)| {
        let align = zone
            .align
            .map_or(plan.page(), |align| align.max(plan.page()));
        (*size, align)
    }))?;
    let mut rams = Vec::new();
    for (index, ((zone, start), (plan, size))) in zones.iter().zip(places).zip(plans).enumerate() {
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
    Ok(Obtained { zones: rams, map })
}
