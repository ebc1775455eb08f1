// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Network device (virtio 1.2, section 5.1), connected to a tap interface of the host.
//!
//! Each packet starts with a header that describes its checksum and segmentation offloads. Tap and
//! guest use the same header, so the device passes packets unchanged and only negotiates the
//! offloads. A packet to the guest may span several buffers (`MRG_RXBUF`).
//!
//! When the tap disappears, the device reports the link as down and drops the guest's packets.

mod tap;
#[cfg(test)]
mod tests;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use virtio_bindings::{virtio_ids::VIRTIO_ID_NET, virtio_net::*};

use super::{
    ConfigSpace, DescriptorChain, DeviceError, DeviceProperties, Direction, Queue, Queues,
    RateLimitedLog, VirtioDevice, feature_bit, feature_bits,
};

pub use tap::Tap;

const RECEIVE_QUEUE: usize = 0;
const TRANSMIT_QUEUE: usize = 1;

/// Features that the device offers in addition to [`GUEST_OFFLOADS`].
const OFFERED_FEATURES: [u32; 8] = [
    VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_MAC,
    VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_HOST_ECN,
    VIRTIO_NET_F_HOST_UFO,
    VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_STATUS,
];

/// Features by which the guest accepts an offload, each with the tap's offload flag.
const GUEST_OFFLOADS: [(u32, libc::c_uint); 5] = [
    (VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
    (VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
    (VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
    (VIRTIO_NET_F_GUEST_ECN, libc::TUN_F_TSO_ECN),
    (VIRTIO_NET_F_GUEST_UFO, libc::TUN_F_UFO),
];

const QUEUE_SIZE: u16 = 256;
/// Size of the packet header, `struct virtio_net_hdr_v1`, in bytes.
const HEADER_SIZE: usize = 12;
/// Offset of `num_buffers` in the header.
const NUM_BUFFERS_OFFSET: usize = 10;
/// Maximum size of a packet with its header: 64 KiB and an Ethernet header.
const MAX_PACKET_SIZE: usize = HEADER_SIZE + 65536 + 14 + 4;
/// Offset of the link status in the configuration space.
const STATUS_OFFSET: usize = 6;
/// Maximum number of packets received before the worker serves the transmit queue.
const MAX_PACKETS_PER_POLL: usize = 64;

/// Ethernet address.
pub type MacAddress = [u8; 6];

/// Network device.
#[derive(Debug)]
pub struct Net {
    /// Open tap; `None` after it has disappeared.
    tap: Option<Tap>,
    config: ConfigSpace,
    has_mergeable_buffers: bool,
    /// Indicates that the receive queue may have an available buffer.
    has_rx_buffer: bool,
    packet_buffer: Box<[u8]>,
    /// Length of the packet that waits for receive buffers.
    pending_length: Option<usize>,
    log: RateLimitedLog,
}

/// Returns a locally administered address that depends only on the name of the tap.
pub fn mac_from_tap_name(tap: &str) -> MacAddress {
    // FNV-1a suffices: addresses only need to differ between names.
    let hash = tap.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let [a, b, c, d, e, ..] = hash.to_le_bytes();
    [0x02, a, b, c, d, e]
}

impl Net {
    /// Creates a device with this address, connected to a tap.
    pub fn new(tap: Tap, mac: MacAddress) -> Self {
        let mut config = mac.to_vec();
        config.extend(link_status(true));
        Self {
            tap: Some(tap),
            config: ConfigSpace::new(config, 0..0),
            has_mergeable_buffers: false,
            has_rx_buffer: false,
            packet_buffer: vec![0; MAX_PACKET_SIZE].into_boxed_slice(),
            pending_length: None,
            log: RateLimitedLog::default(),
        }
    }

    fn take_link_down(&mut self, error: &io::Error) {
        let Some(tap) = self.tap.take() else {
            return;
        };
        let name = tap.name;
        self.log.warn(format_args!(
            "the tap {name} has disappeared; the guest's link is down: {error}"
        ));
        self.config.update(STATUS_OFFSET, &link_status(false));
    }

    fn transmit(&mut self, queue: &mut Queue) -> Result<(), DeviceError> {
        let mut tap_error = None;
        queue.serve_available(|chain| {
            let Some(tap) = self.tap.as_ref().filter(|_| tap_error.is_none()) else {
                return Ok(0);
            };
            if chain.length(Direction::Readable) > MAX_PACKET_SIZE {
                return Err(DeviceError::Request("a packet is larger than 64 KiB"));
            }
            match chain.write_packet(tap) {
                Err(error) if tap_has_disappeared(&error) => tap_error = Some(error),
                // The packet is dropped if the queue is full, the interface is down or the packet
                // is invalid.
                Err(error) => log::debug!("{}: a packet is dropped: {error}", tap.name),
                Ok(_) => {}
            }
            Ok(0)
        })?;
        if let Some(error) = tap_error {
            self.take_link_down(&error);
        }
        Ok(())
    }

    /// Copies packets to the guest until the tap has no packet or the guest has no buffer.
    fn receive(&mut self, queue: &mut Queue) -> Result<(), DeviceError> {
        for _ in 0..MAX_PACKETS_PER_POLL {
            if self.pending_length.is_none() && !self.read_packet() {
                break;
            }
            // Each packet that is read is delivered before the worker waits for the tap again, which may
            // have no further one.
            if !self.deliver_pending(queue)? {
                // The tap is not read until the driver adds a buffer.
                self.has_rx_buffer = false;
                break;
            }
        }
        queue.signal_used()
    }

    /// Copies the pending packet to the guest's buffers. Returns false if they lack space.
    fn deliver_pending(&mut self, queue: &mut Queue) -> Result<bool, DeviceError> {
        let Some(length) = self.pending_length else {
            return Ok(true);
        };
        let mut chains: Vec<(DescriptorChain, usize)> = Vec::new();
        let mut copied = 0;
        while copied < length {
            let Some(chain) = queue.pop()? else {
                // Notifications are enabled before `undo_pop` returns chains, so that the driver
                // notifies the device of further buffers.
                if queue.enable_notification()? {
                    continue;
                }
                for _ in &chains {
                    queue.undo_pop();
                }
                return Ok(false);
            };
            let space = chain.length(Direction::Writable);
            if space < HEADER_SIZE {
                let problem = "a receive buffer is smaller than the header of a packet";
                return Err(DeviceError::Request(problem));
            }
            if chains.len() >= usize::from(QUEUE_SIZE) {
                // The driver adds buffers meanwhile, and uses some of them twice.
                let problem = "a packet has more receive buffers than the queue";
                return Err(DeviceError::Request(problem));
            }
            if !self.has_mergeable_buffers && space < length {
                // Another host may have sent it, so the packet is dropped, not the device.
                log::debug!("a packet of {length} bytes does not fit a buffer of {space}");
                queue.undo_pop();
                self.pending_length = None;
                return Ok(true);
            }
            let part = space.min(length - copied);
            chains.push((chain, part));
            copied += part;
        }
        let buffers = u16::try_from(chains.len()).unwrap_or(u16::MAX);
        self.packet_buffer[NUM_BUFFERS_OFFSET..HEADER_SIZE].copy_from_slice(&buffers.to_le_bytes());
        let mut copied = 0;
        for (chain, part) in chains {
            chain.write(0, &self.packet_buffer[copied..copied + part]);
            queue.add_used(chain.head_index, part)?;
            copied += part;
        }
        self.pending_length = None;
        Ok(true)
    }

    /// Reads a packet from the tap. Returns false if there is none.
    fn read_packet(&mut self) -> bool {
        let Some(tap) = &self.tap else {
            return false;
        };
        match rustix::io::read(tap, &mut self.packet_buffer[..]) {
            Ok(length) if length > HEADER_SIZE => {
                self.pending_length = Some(length);
                true
            }
            Ok(0) => {
                self.take_link_down(&io::ErrorKind::UnexpectedEof.into());
                false
            }
            // Drops a packet without content.
            Ok(_) => true,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => false,
            Err(error) => {
                let error = error.into();
                if tap_has_disappeared(&error) {
                    self.take_link_down(&error);
                    return false;
                }
                // The kernel drops a packet that it cannot describe to the guest, and goes on.
                log::debug!("{}: a packet is dropped: {error}", tap.name);
                true
            }
        }
    }
}

impl VirtioDevice for Net {
    fn properties(&self) -> DeviceProperties {
        DeviceProperties {
            device_type: VIRTIO_ID_NET,
            features: feature_bits(&OFFERED_FEATURES)
                | feature_bits(&GUEST_OFFLOADS.map(|(f, _)| f)),
            queue_sizes: &[QUEUE_SIZE, QUEUE_SIZE],
            config: self.config.clone(),
        }
    }

    fn activate(&mut self, features: u64, _: &mut Queues) -> Result<(), DeviceError> {
        self.has_mergeable_buffers = features & feature_bit(VIRTIO_NET_F_MRG_RXBUF) != 0;
        let flags = tap_offloads(features);
        let tap = self.tap.as_ref();
        match tap.map_or(Ok(()), |tap| tap.set_offloads(flags)) {
            Err(error) if tap_has_disappeared(&error) => {
                self.take_link_down(&error);
                Ok(())
            }
            other => other.map_err(DeviceError::host_call(
                "negotiating offloads with the tap (TUNSETOFFLOAD)",
            )),
        }
    }

    fn restored(&mut self) {
        // The tap of the VM that was saved may have disappeared.
        let (mut saved, status) = ([0; 2], link_status(self.tap.is_some()));
        self.config.read(STATUS_OFFSET as u64, &mut saved);
        if saved != status {
            self.config.update(STATUS_OFFSET, &status);
        }
    }

    fn process_queue(&mut self, index: usize, queue: &mut Queue) -> Result<(), DeviceError> {
        match index {
            TRANSMIT_QUEUE => self.transmit(queue),
            _ => {
                self.has_rx_buffer = true;
                self.receive(queue)
            }
        }
    }

    fn backend_fds(&self) -> Vec<BorrowedFd<'_>> {
        let tap = self.tap.iter().filter(|_| self.has_rx_buffer);
        tap.map(AsFd::as_fd).collect()
    }

    fn process_backend(&mut self, queues: &mut Queues) -> Result<(), DeviceError> {
        queues[RECEIVE_QUEUE].as_mut().map_or(Ok(()), |queue| self.receive(queue))
    }

    fn reset(&mut self) {
        self.has_rx_buffer = false;
        self.pending_length = None;
    }
}

fn tap_has_disappeared(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBADFD | libc::ENODEV | libc::ENXIO))
}

fn link_status(up: bool) -> [u8; 2] {
    let status = if up { VIRTIO_NET_S_LINK_UP } else { 0 };
    let [low, high, ..] = status.to_le_bytes();
    [low, high]
}

/// Returns the offloads that the kernel may leave to a guest with these features.
fn tap_offloads(features: u64) -> libc::c_uint {
    let accepted = GUEST_OFFLOADS.iter().filter(|(f, _)| features & feature_bit(*f) != 0);
    accepted.fold(0, |flags, (_, flag)| flags | flag)
}
