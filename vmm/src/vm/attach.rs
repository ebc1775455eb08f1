// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Virtio devices of a machine: opened, put on the bus, their notifications wired as ioeventfds.

use std::{io, path::PathBuf, sync::Arc};

use kvm_ioctls::IoEventAddress;
use parking_lot::Mutex;
use serde::Serialize;
use thiserror::Error;

use super::{
    open_files::Opened,
    platform::{Platform, PlatformError},
};
use crate::{
    devices::virtio::{
        Transport, VirtioDevice,
        balloon::{Balloon, BalloonHandle},
        block::{Block, DiskError},
        console::Console,
        net::{MacAddress, Net, TapError, mac_for},
        rng::Rng,
        vsock::{Vsock, VsockError},
    },
    kvm::KvmError,
    memory::GuestMemory,
};

/// A disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiskConfig {
    /// The image or block device.
    pub path: PathBuf,
    /// Whether the guest may only read it.
    pub read_only: bool,
}

/// A network card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NetConfig {
    /// The tap at its other end.
    pub tap: String,
    /// Its address; one made from the tap's name if not given.
    pub mac: Option<MacAddress>,
}

/// Sockets between guest and host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct VsockConfig {
    /// The guest's address.
    pub cid: u32,
}

/// A machine's virtio devices. There is always one for entropy.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Devices {
    /// Disks, in the order of the guest's `/dev/vda`, `/dev/vdb`, ….
    pub disks: Vec<DiskConfig>,
    /// Network cards.
    pub nets: Vec<NetConfig>,
    /// Sockets between guest and host.
    pub vsock: Option<VsockConfig>,
    /// Whether there is a balloon.
    pub balloon: bool,
    /// Whether there is a console, `hvc0`, that is the terminal instead of the serial port.
    pub console: bool,
}

/// Why a device cannot be had.
#[derive(Debug, Error)]
pub enum AttachError {
    /// A disk.
    #[error("--disk")]
    Disk(#[from] DiskError),
    /// A network card.
    #[error("--net")]
    Net(#[from] TapError),
    /// Sockets between guest and host.
    #[error("--vsock")]
    Vsock(#[from] VsockError),
    /// It has no place.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// Event file descriptors.
    #[error("no event file descriptor can be had for a device")]
    Event(#[from] io::Error),
}

/// Puts the devices on the bus, with what is open for them, and the console, if there is one. Gives
/// what controls the balloon, if there is one.
///
/// # Errors
/// One of them cannot be had; the error says which and why.
pub fn attach(
    platform: &mut Platform<'_>,
    devices: &Devices,
    opened: &Opened,
    console: Option<Console>,
    memory: &Arc<GuestMemory>,
) -> Result<Option<BalloonHandle>, AttachError> {
    for (index, disk) in opened.disks.iter().enumerate() {
        let name = format!("disk{index}");
        let device = Block::new(disk.try_clone()?, &name);
        add(platform, &name, Box::new(device), memory)?;
    }
    for (index, (net, tap)) in devices.nets.iter().zip(&opened.taps).enumerate() {
        let mac = net.mac.unwrap_or_else(|| mac_for(&net.tap));
        let device = Net::new(tap.try_clone()?, mac);
        add(platform, &format!("net{index}"), Box::new(device), memory)?;
    }
    add(platform, "entropy", Box::new(Rng::default()), memory)?;
    if let Some(console) = console {
        add(platform, "console", Box::new(console), memory)?;
    }
    if let Some(vhost) = &opened.vsock {
        let device = Vsock::new(vhost.clone())?;
        add(platform, "vsock", Box::new(device), memory)?;
    }
    if !devices.balloon {
        return Ok(None);
    }
    let balloon = Balloon::new()?;
    let handle = balloon.handle();
    add(platform, "balloon", Box::new(balloon), memory)?;
    Ok(Some(handle))
}

fn add(
    platform: &mut Platform<'_>,
    name: &str,
    device: Box<dyn VirtioDevice>,
    memory: &Arc<GuestMemory>,
) -> Result<(), AttachError> {
    let start = platform.place_virtio()?;
    let (number, irq) = platform.interrupt()?;
    let transport = Transport::new(name, device, Arc::clone(memory), irq)?;
    for notifier in transport.notifiers() {
        let address = IoEventAddress::Mmio(start.0 + notifier.offset);
        platform
            .vm()
            .register_ioevent(notifier.event.as_ref(), &address, notifier.value)
            .map_err(|error| KvmError::call("wiring a queue's notification (KVM_IOEVENTFD)", error))
            .map_err(PlatformError::from)?;
    }
    let description = transport.describe(start, number);
    Ok(platform.add(description, Arc::new(Mutex::new(transport)))?)
}
