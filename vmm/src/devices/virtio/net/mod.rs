// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A network card (virtio 1.2, section 5.1), its other end a tap of the host's.
//!
//! Every packet has a header in front that says which checksums are still to be made and how a
//! large packet is to be cut; tap and guest speak the same header, so packets pass as they are,
//! and what one side can do by itself (offloads) is negotiated between the two through this
//! device. A packet to the guest may take several of its buffers (`MRG_RXBUF`).
//!
//! A tap that vanishes takes the link down: the guest sees an unplugged cable, and what it sends
//! is dropped.

mod tap;
#[cfg(test)]
mod tests;

use std::{
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd},
};

use virtio_bindings::{
    virtio_ids::VIRTIO_ID_NET,
    virtio_net::{
        VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN,
        VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO,
        VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
        VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_STATUS,
        VIRTIO_NET_S_LINK_UP,
    },
};

use super::{
    ConfigSpace, DescriptorChain, DeviceError, Direction, Queue, Queues, RateLimitedLog,
    VirtioDevice, bit, transfer,
};

pub use tap::{Tap, TapError};

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;

/// Requests that fit into a queue.
const QUEUE: u16 = 256;

/// Bytes of the header, `struct virtio_net_hdr_v1`.
const HEADER: usize = 12;
/// Where it says how many buffers the packet takes.
const BUFFERS: usize = 10;

/// The largest packet with its header: 64 KiB, and an Ethernet header.
const MOST: usize = HEADER + 65536 + 14 + 4;

/// Where the configuration space says whether the link is up.
const STATUS: usize = 6;

/// Packets handed to the guest before the thread looks at what it sends.
const BATCH: usize = 64;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// The device.
#[derive(Debug)]
pub struct Net {
    /// `None` once it has vanished.
    tap: Option<Tap>,
    config: ConfigSpace,
    merge: bool,
    /// Whether there may be a buffer of the driver's to receive into.
    room: bool,
    /// A packet from the tap, and its length while it waits for room.
    packet: Box<[u8]>,
    waiting: Option<usize>,
    complaints: RateLimitedLog,
}

/// An address that is the same every time for a tap of this name, and locally administered.
#[must_use]
pub fn mac_for(tap: &str) -> Mac {
    // FNV-1a: it need not be more than different for different names.
    let hash = tap.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let [a, b, c, d, e, ..] = hash.to_le_bytes();
    [0x02, a, b, c, d, e]
}

impl Net {
    /// A card with this address, at the other end of a tap.
    #[must_use]
    pub fn new(tap: Tap, mac: Mac) -> Self {
        let mut config = mac.to_vec();
        config.extend(link(true));
        Self {
            tap: Some(tap),
            config: ConfigSpace::new(config, 0..0),
            merge: false,
            room: false,
            packet: vec![0; MOST].into_boxed_slice(),
            waiting: None,
            complaints: RateLimitedLog::default(),
        }
    }

    fn lose(&mut self, error: &io::Error) {
        let Some(tap) = self.tap.take() else {
            return;
        };
        let name = tap.name();
        self.complaints.warn(format_args!(
            "the tap {name} has vanished and the guest's link is down: {error}"
        ));
        self.config.change(STATUS, &link(false));
    }

    fn transmit(&mut self, queues: &mut Queues) -> Result<(), DeviceError> {
        let Some(ring) = queues.get(TRANSMIT) else {
            return Ok(());
        };
        let mut lost = None;
        ring.drain(|memory, chain| {
            let Some(tap) = self.tap.as_ref().filter(|_| lost.is_none()) else {
                return Ok(0);
            };
            if chain.length(Direction::Readable) > MOST {
                return Err(DeviceError::Request("a packet is larger than 64 KiB"));
            }
            match transfer::write_packet(tap.as_raw_fd(), memory, chain) {
                Err(error) if has_vanished(&error) => lost = Some(error),
                // A full queue, a tap that is down or a packet that makes no sense: networks lose
                // packets.
                Err(error) => log::debug!("{}: a packet is dropped: {error}", tap.name()),
                Ok(_) => {}
            }
            Ok(0)
        })?;
        if let Some(error) = lost {
            self.lose(&error);
        }
        Ok(())
    }

    /// Puts the packet that waits into the guest's buffers; says whether there was room.
    fn deliver(&mut self, ring: &mut Queue) -> Result<bool, DeviceError> {
        let Some(length) = self.waiting else {
            return Ok(true);
        };
        let mut taken: Vec<(DescriptorChain, usize)> = Vec::new();
        let mut done = 0;
        while done < length {
            let Some(chain) = ring.pop()? else {
                // Asked for while everything is taken out: the driver is to tell of what comes
                // behind it.
                if ring.listen()? {
                    continue;
                }
                for _ in &taken {
                    ring.undo_pop();
                }
                return Ok(false);
            };
            let room = chain.length(Direction::Writable);
            if room < HEADER || (!self.merge && room < length) {
                let problem = "a buffer for a packet is too small";
                return Err(DeviceError::Request(problem));
            }
            let part = room.min(length - done);
            taken.push((chain, part));
            done += part;
        }
        let buffers = u16::try_from(taken.len()).unwrap_or(u16::MAX);
        self.packet[BUFFERS..HEADER].copy_from_slice(&buffers.to_le_bytes());
        let mut done = 0;
        for (chain, part) in taken {
            chain.copy_in(ring.memory(), 0, &self.packet[done..done + part]);
            ring.finish(chain.head(), u32::try_from(part).unwrap_or(0))?;
            done += part;
        }
        self.waiting = None;
        Ok(true)
    }

    /// Reads a packet from the tap; says whether there was one.
    fn next_packet(&mut self) -> bool {
        let Some(tap) = &self.tap else {
            return false;
        };
        match rustix::io::read(tap, &mut self.packet[..]) {
            Ok(length) if length > HEADER => {
                self.waiting = Some(length);
                true
            }
            Ok(0) => {
                self.lose(&io::ErrorKind::UnexpectedEof.into());
                false
            }
            // Nothing a driver could use.
            Ok(_) => true,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => false,
            Err(error) => {
                self.lose(&error.into());
                false
            }
        }
    }
}

impl VirtioDevice for Net {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn features(&self) -> u64 {
        [
            VIRTIO_NET_F_CSUM,
            VIRTIO_NET_F_GUEST_CSUM,
            VIRTIO_NET_F_MAC,
            VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_F_GUEST_TSO6,
            VIRTIO_NET_F_GUEST_ECN,
            VIRTIO_NET_F_GUEST_UFO,
            VIRTIO_NET_F_HOST_TSO4,
            VIRTIO_NET_F_HOST_TSO6,
            VIRTIO_NET_F_HOST_ECN,
            VIRTIO_NET_F_HOST_UFO,
            VIRTIO_NET_F_MRG_RXBUF,
            VIRTIO_NET_F_STATUS,
        ]
        .into_iter()
        .fold(0, |features, feature| features | bit(feature))
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE, QUEUE]
    }

    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn activate(&mut self, features: u64, _: &mut Queues) -> Result<(), DeviceError> {
        self.merge = features & bit(VIRTIO_NET_F_MRG_RXBUF) != 0;
        let flags = offloads(features);
        let done = self
            .tap
            .as_ref()
            .map_or(Ok(()), |tap| tap.set_offloads(flags));
        match done {
            Err(error) if has_vanished(&error) => {
                self.lose(&error);
                Ok(())
            }
            other => other.map_err(|source| DeviceError::Host {
                doing: "agreeing on offloads with the tap (TUNSETOFFLOAD)",
                source,
            }),
        }
    }

    fn process_queue(&mut self, queue: usize, queues: &mut Queues) -> Result<(), DeviceError> {
        match queue {
            TRANSMIT => self.transmit(queues),
            _ => {
                self.room = true;
                self.process_backend(queues)
            }
        }
    }

    fn backend_fd(&self) -> Option<BorrowedFd<'_>> {
        self.tap.as_ref().filter(|_| self.room).map(AsFd::as_fd)
    }

    fn process_backend(&mut self, queues: &mut Queues) -> Result<(), DeviceError> {
        let Some(ring) = queues.get(RECEIVE) else {
            return Ok(());
        };
        let mut left = BATCH;
        while left > 0 {
            if !self.deliver(ring)? {
                // No packet is read until the driver says that there is room again.
                self.room = false;
                break;
            }
            if !self.next_packet() {
                break;
            }
            left -= 1;
        }
        ring.announce()
    }

    fn reset(&mut self) {
        self.room = false;
        self.waiting = None;
    }
}

/// What the kernel may leave to the guest, by the features that the guest took.
fn offloads(features: u64) -> libc::c_uint {
    [
        (VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
        (VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
        (VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
        (VIRTIO_NET_F_GUEST_ECN, libc::TUN_F_TSO_ECN),
        (VIRTIO_NET_F_GUEST_UFO, libc::TUN_F_UFO),
    ]
    .into_iter()
    .filter(|(feature, _)| features & bit(*feature) != 0)
    .fold(0, |flags, (_, flag)| flags | flag)
}

fn has_vanished(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EBADFD | libc::ENODEV | libc::ENXIO)
    )
}

fn link(up: bool) -> [u8; 2] {
    let status = if up { VIRTIO_NET_S_LINK_UP } else { 0 };
    let [low, high, ..] = status.to_le_bytes();
    [low, high]
}
