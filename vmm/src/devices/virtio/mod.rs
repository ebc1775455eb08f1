// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Virtio devices over the MMIO transport (virtio 1.2, section 4.2).
//!
//! A device implements [`VirtioDevice`]: it describes itself and serves its queues. [`Transport`]
//! exposes it as registers. Once the driver has set `DRIVER_OK`, the device moves into a worker
//! thread that waits for queue notifications and for the device's backend on the host; a reset
//! moves it back. Therefore only one thread at a time uses a device, and no vCPU waits for I/O.
//! Transport and worker share only the configuration space ([`ConfigSpace`]) and the interrupt
//! state ([`Interrupt`]).
//!
//! Everything in a queue is untrusted. Ring indices, addresses and lengths are validated before
//! use. An invalid value sets the status bit `DEVICE_NEEDS_RESET` (section 2.1.2): the device stops
//! until the driver resets it, and the VM continues.

pub mod balloon;
pub mod block;
pub mod console;
mod descriptor_chain;
pub mod net;
mod queue;
pub mod rng;
mod shared_state;
#[cfg(test)]
pub(crate) mod testing;
mod transport;
pub mod vsock;
mod worker;

use std::{fmt, io, os::fd::BorrowedFd};

use thiserror::Error;

use descriptor_chain::{DescriptorChain, Direction};
pub use queue::{Queue, Queues};
pub use shared_state::{ConfigSpace, Interrupt};
pub use transport::{Transport, TransportState};
pub use virtio_queue::QueueState;

/// Error that stops a device until the driver resets it.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// Error returned for an invalid queue.
    #[error("the driver's queue is invalid: {0}")]
    Queue(#[from] virtio_queue::Error),
    /// Error returned for an invalid request.
    #[error("the driver's request is invalid: {0}")]
    Request(&'static str),
    /// Stop of the device before a request was served, which is available again.
    #[error("the device was stopped within a request")]
    Stopped,
    /// Error of a call on the host.
    #[error("{operation}: {source}")]
    HostCall {
        /// Purpose of the call.
        operation: &'static str,
        /// Error of the call.
        source: io::Error,
    },
}

impl DeviceError {
    /// Returns a function for `map_err` that adds `operation` to an error of a host call.
    fn host_call<E: Into<io::Error>>(operation: &'static str) -> impl Fn(E) -> Self {
        move |error| Self::HostCall { operation, source: error.into() }
    }
}

/// Error returned when the backend of a device on the host cannot be used.
#[derive(Debug, Error)]
#[error("{message}")]
pub struct BackendError {
    message: String,
    source: Option<io::Error>,
}

impl BackendError {
    fn new(message: impl Into<String>, source: impl Into<Option<io::Error>>) -> Self {
        Self { message: message.into(), source: source.into() }
    }
}

/// Log with a limit on the warnings of one device, so that no guest fills it.
#[derive(Debug, Default)]
pub struct RateLimitedLog(u32);

impl RateLimitedLog {
    /// Number of warnings before further messages are logged at debug level.
    const MAX_WARNINGS: u32 = 8;

    /// Logs a warning, or a debug message once the device has reached its limit.
    pub fn warn(&mut self, message: fmt::Arguments<'_>) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            ..Self::MAX_WARNINGS => log::warn!("{message}"),
            Self::MAX_WARNINGS => {
                log::warn!("{message} (further warnings of this device are debug messages)")
            }
            _ => log::debug!("{message}"),
        }
    }
}

/// Properties of a device that do not change while it exists.
#[derive(Debug)]
pub struct DeviceProperties {
    /// Device identifier (virtio 1.2, section 5).
    pub device_type: u32,
    /// Feature bits of the device, without those of queues and transport.
    pub features: u64,
    /// Maximum size of each queue, a power of two.
    pub queue_sizes: &'static [u16],
    /// Configuration space, which the transport shares.
    pub config: ConfigSpace,
}

/// Virtio device, without its transport. An error stops the device until the driver resets it.
pub trait VirtioDevice: Send {
    /// Returns the properties of the device.
    fn properties(&self) -> DeviceProperties;

    /// Activates the device at `DRIVER_OK`, with the negotiated features. A device whose backend
    /// serves a queue removes it from `queues`; the worker then does not read its notifications.
    fn activate(&mut self, _features: u64, _queues: &mut Queues) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Processes the queue of this index, which the driver has notified.
    fn process_queue(&mut self, index: usize, queue: &mut Queue) -> Result<(), DeviceError>;

    /// Returns the backend's file descriptors to poll.
    fn backend_fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// Handles one of [`VirtioDevice::backend_fds`] that is readable or has an error.
    fn process_backend(&mut self, _queues: &mut Queues) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Stops the backend before a snapshot, and returns the queues that it serves to `queues`, at its
    /// positions. The device is activated again afterwards. On failure it stops until the driver
    /// resets it.
    fn suspend(&mut self, _queues: &mut Queues) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Continues the device of a snapshot, which had another backend. It is activated afterwards.
    fn restored(&mut self) {}

    /// Discards the state of all requests when the driver resets the device.
    fn reset(&mut self) {}
}

const fn feature_bit(feature: u32) -> u64 {
    1 << feature
}

fn feature_bits(features: &[u32]) -> u64 {
    features.iter().fold(0, |bits, feature| bits | feature_bit(*feature))
}
