// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Virtio devices behind the MMIO transport (virtio 1.2, section 4.2).
//!
//! A device is an implementation of [`VirtioDevice`]: it says what it is and serves its queues.
//! [`Transport`] makes registers of it. Once the driver has set the device up, the device moves
//! into a thread of its own, which waits for the driver's notifications and for whatever else the
//! device reads from; a reset brings it back. So no two threads ever work on one device, vCPUs
//! never wait for input and output, and the only state that both sides see is the configuration
//! space ([`Config`]) and the interrupt's ([`Interrupt`]).
//!
//! Everything in a queue is the guest's word. Rings, indices, addresses and lengths are checked
//! before they are used, and what is wrong with one of them ends in the status bit
//! `DEVICE_NEEDS_RESET` (section 2.1.2): the device stops until the driver resets it, and the
//! machine goes on.

pub mod balloon;
pub mod block;
mod chain;
mod complaint;
mod config;
pub mod console;
mod interrupt;
pub mod net;
mod ring;
pub mod rng;
#[cfg(test)]
mod testing;
mod transfer;
mod transport;
pub mod vsock;
mod worker;

use std::{io, os::fd::BorrowedFd};

use thiserror::Error;

pub use chain::{Chain, Part};
pub use complaint::Complaints;
pub use config::Config;
pub use interrupt::Interrupt;
pub use ring::{Ring, Rings, Setup};
pub use transport::{Notifier, Transport};

/// Why a device stopped serving its queues. The driver is told, and can reset it.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// A ring is not what it has to be.
    #[error("the driver's ring cannot be used: {0}")]
    Ring(#[from] virtio_queue::Error),
    /// A request is not what it has to be.
    #[error("the driver's request cannot be used: {0}")]
    Request(&'static str),
    /// The host's side failed.
    #[error("{doing}: {source}")]
    Host {
        /// What was tried.
        doing: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// What a device is and does.
pub trait VirtioDevice: Send {
    /// Its device identifier (virtio 1.2, section 5).
    fn kind(&self) -> u32;

    /// The features it offers, besides those of rings and transport.
    fn features(&self) -> u64;

    /// The largest size of each of its queues: powers of two.
    fn queue_sizes(&self) -> &[u16];

    /// Its configuration space, shared with the transport.
    fn config(&self) -> &Config;

    /// The driver has accepted `features` and is about to use the queues. A queue that somebody
    /// else is to serve is taken out of `rings`: its notifications are left alone then.
    ///
    /// # Errors
    /// The device cannot work that way.
    fn start(&mut self, features: u64, rings: &mut Rings) -> Result<(), DeviceError> {
        let _ = (features, rings);
        Ok(())
    }

    /// The driver has put something into this queue.
    ///
    /// # Errors
    /// The device cannot go on.
    fn process(&mut self, queue: usize, rings: &mut Rings) -> Result<(), DeviceError>;

    /// What the device wants to read from now, if anything.
    fn input(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// There is something to read, or an error, where [`VirtioDevice::input`] said.
    ///
    /// # Errors
    /// The device cannot go on.
    fn receive(&mut self, rings: &mut Rings) -> Result<(), DeviceError> {
        let _ = rings;
        Ok(())
    }

    /// The driver resets the device: what was kept of its requests is forgotten.
    fn reset(&mut self) {}
}

/// A feature's bit.
const fn bit(feature: u32) -> u64 {
    1 << feature
}
