// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Virtio devices behind the MMIO transport (virtio 1.2, section 4.2).
//!
//! A device is an implementation of [`VirtioDevice`]: it says what it is and serves its queues.
//! [`Transport`] makes registers of it. Once the driver has set the device up, the device moves
//! into a thread of its own, which waits for the driver's notifications and for whatever else the
//! device reads from; a reset brings it back. So no two threads ever work on one device, vCPUs
//! never wait for input and output, and the only state that both sides see is the configuration
//! space ([`ConfigSpace`]) and the interrupt's ([`Interrupt`]).
//!
//! Everything in a queue is the guest's word. Queues, indices, addresses and lengths are checked
//! before they are used, and what is wrong with one of them ends in the status bit
//! `DEVICE_NEEDS_RESET` (section 2.1.2): the device stops until the driver resets it, and the
//! machine goes on.

pub mod balloon;
pub mod block;
mod config_space;
pub mod console;
mod descriptor_chain;
mod interrupt;
pub mod net;
mod queue;
mod rate_limited_log;
pub mod rng;
#[cfg(test)]
mod testing;
mod transfer;
mod transport;
pub mod vsock;
mod worker;

use std::{io, os::fd::BorrowedFd};

use thiserror::Error;

pub use config_space::ConfigSpace;
pub use descriptor_chain::{DescriptorChain, Direction};
pub use interrupt::Interrupt;
pub use queue::{Queue, QueueConfig, Queues};
pub use rate_limited_log::RateLimitedLog;
pub use transport::{Notifier, Transport};

/// Why a device stopped serving its queues. The driver is told, and can reset it.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// A ring is not what it has to be.
    #[error("the driver's ring cannot be used: {0}")]
    Queue(#[from] virtio_queue::Error),
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
    fn device_type(&self) -> u32;

    /// The features it offers, besides those of queues and transport.
    fn features(&self) -> u64;

    /// The largest size of each of its queues: powers of two.
    fn queue_sizes(&self) -> &[u16];

    /// Its configuration space, shared with the transport.
    fn config(&self) -> &ConfigSpace;

    /// The driver has accepted `features` and is about to use the queues. A queue that somebody
    /// else is to serve is taken out of `queues`: its notifications are left alone then.
    ///
    /// # Errors
    /// The device cannot work that way.
    fn activate(&mut self, features: u64, queues: &mut Queues) -> Result<(), DeviceError> {
        let _ = (features, queues);
        Ok(())
    }

    /// The driver has put something into this queue.
    ///
    /// # Errors
    /// The device cannot go on.
    fn process_queue(&mut self, queue: usize, queues: &mut Queues) -> Result<(), DeviceError>;

    /// What the device wants to read from now, if anything.
    fn backend_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// There is something to read, or an error, where [`VirtioDevice::input`] said.
    ///
    /// # Errors
    /// The device cannot go on.
    fn process_backend(&mut self, queues: &mut Queues) -> Result<(), DeviceError> {
        let _ = queues;
        Ok(())
    }

    /// The driver resets the device: what was kept of its requests is forgotten.
    fn reset(&mut self) {}
}

/// A feature's bit.
const fn bit(feature: u32) -> u64 {
    1 << feature
}
