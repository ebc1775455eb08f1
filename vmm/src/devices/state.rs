// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! States of devices, as a snapshot contains them.
//!
//! A device is suspended before its state is taken and before memory is saved, so that both are of
//! the same moment. A device of the same configuration takes the state on. States come from a file
//! and are not trusted: a device checks them as it checks what a driver writes.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::virtio::TransportState;

/// State of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceState {
    /// A 16550.
    Serial(SerialState),
    /// A PL011.
    Pl011(Pl011State),
    /// The real-time clock.
    Rtc(RtcState),
    /// A virtio device.
    Virtio(TransportState),
    /// The generation of the VM, which is another one after a restore.
    VmGeneration,
}

impl DeviceState {
    /// Returns the error of `device`, which cannot take this state.
    #[must_use]
    pub fn refused_by(&self, device: &str) -> RestoreError {
        let kind = match self {
            Self::Serial(_) => "a 16550",
            Self::Pl011(_) => "a PL011",
            Self::Rtc(_) => "a real-time clock",
            Self::Virtio(_) => "a virtio device",
            Self::VmGeneration => "the generation of a VM",
        };
        RestoreError(format!("the state of {kind} does not fit {device}"))
    }
}

/// Error returned when a device cannot take a state.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct RestoreError(pub String);

impl RestoreError {
    /// Adds the name of the device.
    #[must_use]
    pub fn of_device(self, name: &str) -> Self {
        Self(format!("{name}: {}", self.0))
    }
}

/// Registers of a 16550, with its input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SerialState {
    pub(super) divisor: [u8; 2],
    pub(super) interrupt_enable: u8,
    pub(super) interrupt_identification: u8,
    pub(super) line_control: u8,
    pub(super) line_status: u8,
    pub(super) modem_control: u8,
    pub(super) modem_status: u8,
    pub(super) scratch: u8,
    pub(super) input: Vec<u8>,
}

/// Registers of a PL011, with its input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pl011State {
    pub(super) input: Vec<u8>,
    pub(super) raw_interrupts: u32,
    pub(super) interrupt_mask: u32,
    /// Values of registers without effect, by offset.
    pub(super) scratch: Vec<(u64, u32)>,
}

/// Registers of the real-time clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RtcState {
    pub(super) load: u32,
    /// Difference to the host's time, in seconds.
    pub(super) offset: i64,
    pub(super) compare: u32,
    pub(super) interrupt_mask: u32,
    pub(super) raw_interrupts: u32,
}
