// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Puts devices on the bus: each gets its registers' place, an interrupt where it has one, and an
//! event file descriptor that KVM turns into that interrupt.

use std::{io, sync::Arc};

use granule_types::units::GuestAddress;
use kvm_ioctls::VmFd;
use parking_lot::Mutex;
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use super::layout::{PLATFORM_DEVICE_STEP, PLATFORM_DEVICES, VIRTIO_DEVICE_STEP, VIRTIO_DEVICES};
use crate::{
    devices::{Bus, BusError, MmioDevice, MmioDeviceInfo},
    kvm::KvmError,
};

/// As many interrupts as devices can have: more than anyone has used.
pub const INTERRUPTS: u32 = 256;

/// Why a device has no place.
#[derive(Debug, Error)]
pub enum PlatformError {
    /// The bus has none.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// The kernel refuses.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// No event file descriptor.
    #[error("no event file descriptor can be had for a device's interrupt")]
    Event(#[from] io::Error),
    /// There are too many devices.
    #[error("there is no room for another device: use fewer")]
    Full,
}

/// The devices of a machine that is being built.
#[derive(Debug)]
pub struct Platform<'a> {
    vm: &'a VmFd,
    bus: Bus,
    next_platform: u64,
    next_virtio: u64,
    next_interrupt: u32,
}

impl<'a> Platform<'a> {
    /// No devices.
    #[must_use]
    pub fn new(vm: &'a VmFd) -> Self {
        Self {
            vm,
            bus: Bus::new(),
            next_platform: PLATFORM_DEVICES.start,
            next_virtio: VIRTIO_DEVICES.start,
            next_interrupt: 0,
        }
    }

    /// The VM that they belong to.
    #[must_use]
    pub const fn vm(&self) -> &VmFd {
        self.vm
    }

    /// Where the next platform device's registers lie.
    ///
    /// # Errors
    /// There is no room left.
    pub fn place(&mut self) -> Result<GuestAddress, PlatformError> {
        let end = PLATFORM_DEVICES.end;
        next(&mut self.next_platform, PLATFORM_DEVICE_STEP, end)
    }

    /// Where the next virtio device's registers lie.
    ///
    /// # Errors
    /// There is no room left.
    pub fn place_virtio(&mut self) -> Result<GuestAddress, PlatformError> {
        let end = VIRTIO_DEVICES.end;
        next(&mut self.next_virtio, VIRTIO_DEVICE_STEP, end)
    }

    /// An interrupt and the event that raises it. The interrupt controller must be there.
    ///
    /// # Errors
    /// There is none left, or the kernel refuses.
    pub fn interrupt(&mut self) -> Result<(u32, EventFd), PlatformError> {
        let number = self.next_interrupt;
        if number >= INTERRUPTS {
            return Err(PlatformError::Full);
        }
        let event = EventFd::new(libc::EFD_NONBLOCK)?;
        self.vm
            .register_irqfd(&event, number)
            .map_err(|error| KvmError::call("wiring a device's interrupt (KVM_IRQFD)", error))?;
        self.next_interrupt += 1;
        Ok((number, event))
    }

    /// Puts a device on the bus.
    ///
    /// # Errors
    /// It overlaps another.
    pub fn add(
        &mut self,
        description: MmioDeviceInfo,
        device: Arc<Mutex<dyn MmioDevice>>,
    ) -> Result<(), PlatformError> {
        Ok(self.bus.add(description, device)?)
    }

    /// The bus with all devices on it.
    #[must_use]
    pub fn finish(self) -> Bus {
        self.bus
    }
}

fn next(place: &mut u64, step: u64, end: u64) -> Result<GuestAddress, PlatformError> {
    let start = *place;
    if start + step > end {
        return Err(PlatformError::Full);
    }
    *place += step;
    Ok(GuestAddress(start))
}
