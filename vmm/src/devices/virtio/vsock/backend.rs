// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host kernel's half of the device: `/dev/vhost-vsock`.
//!
//! It is opened once, and gets its CID then, which no other guest can have until this process ends.
//! For each start it learns the features, where guest memory lies in this process, and where the
//! queues; then it runs. That it is stopped ([`ActiveBackend`]) takes each ring's lock, and it looks for
//! that under the lock before it touches a ring: neither queues nor buffers are touched afterwards,
//! and nothing else has to be asked of it (its `VHOST_GET_VRING_BASE` only reads a number, and
//! `VHOST_RESET_OWNER` it does not have).
//!
//! Addresses in descriptors are the guest's; the kernel looks each up in the table of memory. Queues
//! are given as addresses of this process, and the kernel believes them from their first byte to
//! their last. So what lies in guest memory is not enough for a ring: it has to lie in one piece of
//! it, as what follows in guest memory may be something else here.

use std::{
    fmt, io,
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
};

use thiserror::Error;
use vhost::{
    Error, VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_kern::{VhostKernBackend, vsock::Vsock as Device},
    vsock::VhostVsock as _,
};
use virtio_queue::QueueT as _;
use vm_memory::{
    Address as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
};
use vmm_sys_util::eventfd::EventFd;

use super::{
    super::{DeviceError, Interrupt, Queue, bit, transport::EVERY_DEVICE},
    RECEIVE,
};

/// Messages keep their bounds: `SOCK_SEQPACKET`. Not in the bindings (section 5.10.3).
const F_SEQPACKET: u32 = 1;

/// Why there is no vsock.
#[derive(Debug, Error)]
pub enum VsockError {
    /// The host's half cannot be opened.
    #[error("/dev/vhost-vsock cannot be opened{advice}")]
    Open {
        /// What to do, if that is known.
        advice: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The address is somebody else's.
    #[error("the CID {0} is taken, by another guest or by this host: give another one")]
    Taken(u32),
    /// The kernel refuses.
    #[error("the host's vsock cannot be used ({doing})")]
    Call {
        /// What was tried.
        doing: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The kernel's half can less than the rest of us promises.
    #[error("this host's vsock lacks the virtio features {0:#x}: its kernel is too old")]
    Features(u64),
    /// No event.
    #[error("no event file descriptor can be had")]
    Event(#[source] io::Error),
}

/// The kernel's half, open, with its CID. A copy is the same one.
#[derive(Clone)]
pub struct VsockBackend {
    device: Arc<Handle>,
    cid: u32,
    /// What it offers of what we know.
    features: u64,
}

/// The crate ties a device to a memory when it is opened, which is before there is any: this one
/// stays empty, and [`BoundBackend`] has the machine's.
type Handle = Device<Arc<GuestMemoryMmap>>;

impl fmt::Debug for VsockBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VsockBackend")
            .field("cid", &self.cid)
            .finish_non_exhaustive()
    }
}

impl VsockBackend {
    /// Opens it and takes the CID for the guest.
    ///
    /// # Errors
    /// There is no such device, somebody has the CID, or the kernel refuses.
    pub fn open(cid: u32) -> Result<Self, VsockError> {
        let call = |doing| {
            move |error| VsockError::Call {
                doing,
                source: reason(error),
            }
        };
        let device = Handle::new(Arc::default())
            .map_err(reason)
            .map_err(|source| VsockError::Open {
                advice: advice(&source),
                source,
            })?;
        let offered = device
            .get_features()
            .map_err(call("reading its features, VHOST_GET_FEATURES"))?;
        match EVERY_DEVICE & !offered {
            0 => {}
            lacking => return Err(VsockError::Features(lacking)),
        }
        device
            .set_guest_cid(cid.into())
            .map_err(|error| match reason(error) {
                source if source.raw_os_error() == Some(libc::EADDRINUSE) => VsockError::Taken(cid),
                source => VsockError::Call {
                    doing: "taking the CID, VHOST_VSOCK_SET_GUEST_CID",
                    source,
                },
            })?;
        Ok(Self {
            device: Arc::new(device),
            cid,
            features: offered & bit(F_SEQPACKET),
        })
    }

    /// The guest's CID.
    pub(super) const fn cid(&self) -> u32 {
        self.cid
    }

    /// The features that it offers, besides those of queues and transport, all of which it has.
    pub(super) const fn features(&self) -> u64 {
        self.features
    }

    /// Has the kernel work for this process, if it does not already. Not done by
    /// [`VsockBackend::open`], because it may start a thread of this process, and rights can only be given
    /// up by a process that has one.
    pub(super) fn belong_to_this_process(&self) -> Result<(), VsockError> {
        match self.device.set_owner().map_err(reason) {
            // It did in an earlier life of the guest; the descriptor is ours alone.
            Err(source) if source.raw_os_error() == Some(libc::EBUSY) => Ok(()),
            other => other.map_err(|source| VsockError::Call {
                doing: "VHOST_SET_OWNER",
                source,
            }),
        }
    }

    /// Has the kernel serve the queues to receive and to send by; it says by `used` that the driver
    /// is to be interrupted, and by `broken` that it cannot go on.
    pub(super) fn run(
        &self,
        queues: [Queue; 2],
        features: u64,
        used: &EventFd,
        broken: &EventFd,
    ) -> Result<ActiveBackend, DeviceError> {
        let call = |doing| {
            move |error| DeviceError::Host {
                doing,
                source: reason(error),
            }
        };
        let placed = BoundBackend {
            device: &self.device,
            memory: queues[RECEIVE].memory().map(),
        };
        placed
            .set_features(features)
            .map_err(call("agreeing on features (VHOST_SET_FEATURES)"))?;
        placed
            .set_mem_table(&table(placed.memory))
            .map_err(call("telling where memory lies (VHOST_SET_MEM_TABLE)"))?;
        for (index, ring) in queues.iter().enumerate() {
            let place = place(ring);
            placed
                .set_vring_num(index, place.queue_size)
                .map_err(call("telling a ring's size (VHOST_SET_VRING_NUM)"))?;
            placed
                .set_vring_addr(index, &place)
                .map_err(call("telling where a ring lies (VHOST_SET_VRING_ADDR)"))?;
            placed
                .set_vring_base(index, 0)
                .map_err(call("beginning a ring (VHOST_SET_VRING_BASE)"))?;
            placed
                .set_vring_call(index, used)
                .map_err(call("wiring used buffers (VHOST_SET_VRING_CALL)"))?;
            placed
                .set_vring_err(index, broken)
                .map_err(call("wiring errors (VHOST_SET_VRING_ERR)"))?;
            placed
                .set_vring_kick(index, &ring.kick)
                .map_err(call("wiring notifications (VHOST_SET_VRING_KICK)"))?;
        }
        self.device
            .start()
            .map_err(call("starting the kernel's half (VHOST_VSOCK_SET_RUNNING)"))?;
        Ok(ActiveBackend {
            device: Arc::clone(&self.device),
            queues,
        })
    }
}

/// The kernel at work. Dropping it stops the kernel, which touches neither queues nor buffers then.
pub(super) struct ActiveBackend {
    device: Arc<Handle>,
    /// They hold the memory that the kernel uses.
    queues: [Queue; 2],
}

impl fmt::Debug for ActiveBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActiveBackend")
            .field("queues", &self.queues)
            .finish_non_exhaustive()
    }
}

impl ActiveBackend {
    /// The device's interrupt.
    pub(super) fn interrupt(&self) -> &Interrupt {
        &self.queues[RECEIVE].interrupt
    }
}

impl Drop for ActiveBackend {
    fn drop(&mut self) {
        if let Err(error) = self.device.stop() {
            // Only a process that is not its owner is refused.
            log::error!("the host's vsock cannot be stopped and may write to memory: {error}");
        }
    }
}

/// The device and the machine's memory, by which the crate translates addresses.
struct BoundBackend<'a> {
    device: &'a Handle,
    memory: &'a GuestMemoryMmap,
}

impl AsRawFd for BoundBackend<'_> {
    fn as_raw_fd(&self) -> RawFd {
        self.device.as_raw_fd()
    }
}

impl<'a> VhostKernBackend for BoundBackend<'a> {
    type AS = &'a GuestMemoryMmap;

    fn mem(&self) -> &Self::AS {
        &self.memory
    }

    /// The crate's own check takes a ring that lies across two pieces of memory.
    fn is_valid(&self, ring: &VringConfigData) -> bool {
        lies_in_one_piece(self.memory, ring)
    }
}

/// Whether the kernel can be given the ring's parts as addresses of this process. What else there is
/// to check, [`super::super::QueueConfig::ring`] has.
pub(super) fn lies_in_one_piece(memory: &GuestMemoryMmap, ring: &VringConfigData) -> bool {
    let size = usize::from(ring.queue_size);
    // Section 2.7: entries, and for the queues flags, index, and the index of notifications.
    [
        (ring.desc_table_addr, 16 * size),
        (ring.avail_ring_addr, 6 + 2 * size),
        (ring.used_ring_addr, 6 + 8 * size),
    ]
    .into_iter()
    .all(|(start, length)| memory.get_slice(GuestAddress(start), length).is_ok())
}

/// What the driver has said of a ring.
fn place(ring: &Queue) -> VringConfigData {
    let queue = &ring.queue;
    VringConfigData {
        queue_max_size: queue.max_size(),
        queue_size: queue.size(),
        desc_table_addr: queue.desc_table(),
        avail_ring_addr: queue.avail_ring(),
        used_ring_addr: queue.used_ring(),
        ..VringConfigData::default()
    }
}

/// Where the pieces of guest memory lie in this process.
fn table(memory: &GuestMemoryMmap) -> Vec<VhostUserMemoryRegionInfo> {
    memory
        .iter()
        .map(|region| VhostUserMemoryRegionInfo {
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr().addr() as u64,
            ..VhostUserMemoryRegionInfo::default()
        })
        .collect()
}

/// What the kernel said, where it was the kernel.
fn reason(error: Error) -> io::Error {
    match error {
        Error::VhostOpen(source) | Error::IoctlError(source) | Error::IOError(source) => source,
        other => io::Error::other(other),
    }
}

pub(super) fn advice(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
            ": this host has no vhost-vsock; try 'modprobe vhost_vsock', as root"
        }
        Some(libc::EACCES | libc::EPERM) => {
            ": this user may not; start as root with --user, or have root allow it"
        }
        _ => "",
    }
}
