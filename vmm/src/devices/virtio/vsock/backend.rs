// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Backend of the vsock device in the host's kernel: `/dev/vhost-vsock`.
//!
//! Opening the backend reserves the CID, which no other guest can use until this process ends. Each
//! activation passes the features, the addresses of guest memory in this process and those of the
//! queues, then starts the backend. Before each access to a queue, the kernel checks for a stop
//! ([`ActiveBackend`]) under the queue's lock. Stopping the backend takes these locks; the kernel
//! accesses no queue or buffer afterwards. Its position in an available ring is then that of the next
//! request, and in a used ring the index that it has written there.
//!
//! The kernel translates the guest addresses in descriptors by the memory table. Rings are passed
//! as addresses in this process, and the kernel assumes that each ring is contiguous there. A ring
//! must therefore lie within one memory region: unrelated memory of this process may follow the
//! region.

use std::{
    fmt, io, mem,
    os::fd::{AsRawFd, RawFd},
    sync::{Arc, atomic::Ordering},
};

use vhost::{
    VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_kern::{VhostKernBackend, vsock::Vsock as VhostDevice},
    vsock::VhostVsock as _,
};
use virtio_queue::QueueT as _;
use vm_memory::{
    Address as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
    bitmap::Bitmap,
};
use vmm_sys_util::eventfd::EventFd;

use super::{
    super::{BackendError, DeviceError, Interrupt, Queue, feature_bit},
    RECEIVE_QUEUE,
};
use crate::memory::GuestMap;

/// `SOCK_SEQPACKET` support (section 5.10.3), which the bindings lack.
const VIRTIO_VSOCK_F_SEQPACKET: u32 = 1;

/// Returns a function for `map_err` that adds `operation`, the purpose of the failed call.
pub(super) fn vsock_error(operation: &'static str) -> impl Fn(io::Error) -> BackendError {
    move |source| {
        BackendError::new(format!("the vsock of this host cannot be used ({operation})"), source)
    }
}

/// Returns the kernel's error in an error of the `vhost` crate, or else the whole error.
fn kernel_error(error: vhost::Error) -> io::Error {
    use vhost::Error;
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
            ": permission denied; start as root with --user, or have root permit it"
        }
        _ => "",
    }
}

/// Open backend with its CID; clones share it.
#[derive(Clone)]
pub struct VsockBackend {
    device: Arc<KernelDevice>,
    pub(super) cid: u32,
    /// Device features that the kernel offers and this program knows.
    pub(super) features: u64,
}

/// Device type of the `vhost` crate. The crate binds a device to memory on open, when guest memory
/// does not exist yet. [`BoundBackend`] therefore replaces the device's empty memory.
type KernelDevice = VhostDevice<Arc<GuestMap>>;

impl fmt::Debug for VsockBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VsockBackend").field("cid", &self.cid).finish_non_exhaustive()
    }
}

impl VsockBackend {
    /// Opens the backend and reserves the CID for the guest.
    ///
    /// # Errors
    /// The host has no such device, the CID is in use, or the kernel refuses.
    pub fn open(cid: u32) -> Result<Self, BackendError> {
        let device = KernelDevice::new(Arc::default()).map_err(kernel_error).map_err(|source| {
            let message = format!("/dev/vhost-vsock cannot be opened{}", advice(&source));
            BackendError::new(message, source)
        })?;
        let offered = device
            .get_features()
            .map_err(kernel_error)
            .map_err(vsock_error("reading its features, VHOST_GET_FEATURES"))?;
        device.set_guest_cid(cid.into()).map_err(|error| match kernel_error(error) {
            source if source.raw_os_error() == Some(libc::EADDRINUSE) => {
                let message = format!(
                    "the CID {cid} is taken, by another guest or by this host: choose another one"
                );
                BackendError::new(message, None)
            }
            other => vsock_error("reserving the CID, VHOST_VSOCK_SET_GUEST_CID")(other),
        })?;
        Ok(Self {
            device: Arc::new(device),
            cid,
            features: offered & feature_bit(VIRTIO_VSOCK_F_SEQPACKET),
        })
    }

    /// Makes this process the owner of the device. [`VsockBackend::open`] does not, because the
    /// kernel may start a thread, and only a single-threaded process can drop privileges.
    pub(super) fn set_owner(&self) -> Result<(), BackendError> {
        match self.device.set_owner().map_err(kernel_error) {
            // An earlier boot made this process the owner; no other process has the descriptor.
            Err(source) if source.raw_os_error() == Some(libc::EBUSY) => Ok(()),
            other => other.map_err(vsock_error("VHOST_SET_OWNER")),
        }
    }

    /// Makes the kernel serve the receive and transmit queues. The kernel signals
    /// `call_event` when the driver needs an interrupt, and `err_event` when it cannot continue.
    pub(super) fn start(
        &self,
        queues: [Queue; 2],
        features: u64,
        call_event: &EventFd,
        err_event: &EventFd,
    ) -> Result<ActiveBackend, DeviceError> {
        let call = |operation| move |error| DeviceError::host_call(operation)(kernel_error(error));
        let bound =
            BoundBackend { device: &self.device, memory: queues[RECEIVE_QUEUE].memory.map() };
        bound.set_features(features).map_err(call("setting features (VHOST_SET_FEATURES)"))?;
        bound
            .set_mem_table(&memory_table(bound.memory))
            .map_err(call("passing guest memory (VHOST_SET_MEM_TABLE)"))?;
        for (index, queue) in queues.iter().enumerate() {
            let config = vring_config(queue);
            bound
                .set_vring_num(index, config.queue_size)
                .map_err(call("setting a queue's size (VHOST_SET_VRING_NUM)"))?;
            bound
                .set_vring_addr(index, &config)
                .map_err(call("setting a queue's addresses (VHOST_SET_VRING_ADDR)"))?;
            bound
                .set_vring_base(index, queue.rings.next_avail())
                .map_err(call("setting a queue's base (VHOST_SET_VRING_BASE)"))?;
            bound
                .set_vring_call(index, call_event)
                .map_err(call("setting an interrupt event (VHOST_SET_VRING_CALL)"))?;
            bound
                .set_vring_err(index, err_event)
                .map_err(call("setting an error event (VHOST_SET_VRING_ERR)"))?;
            bound
                .set_vring_kick(index, &queue.kick_event)
                .map_err(call("setting a notification event (VHOST_SET_VRING_KICK)"))?;
        }
        self.device.start().map_err(call("starting the backend (VHOST_VSOCK_SET_RUNNING)"))?;
        let interrupt = Arc::clone(&queues[RECEIVE_QUEUE].interrupt);
        Ok(ActiveBackend { device: Arc::clone(&self.device), interrupt, queues: queues.into() })
    }
}

/// Running backend. Dropping it stops the kernel, which then accesses no queue and no buffer.
pub(super) struct ActiveBackend {
    device: Arc<KernelDevice>,
    pub(super) interrupt: Arc<Interrupt>,
    /// Queues, which own the memory that the kernel accesses.
    queues: Vec<Queue>,
}

impl ActiveBackend {
    /// Stops the kernel between two packets. Returns the queues, at the positions that it has
    /// reached. Its connections stay: a later [`VsockBackend::start`] continues them.
    pub(super) fn stop(mut self) -> Result<Vec<Queue>, DeviceError> {
        let stopping = DeviceError::host_call("stopping the backend (VHOST_VSOCK_SET_RUNNING)");
        let reading = DeviceError::host_call("reading a queue's base (VHOST_GET_VRING_BASE)");
        self.device.stop().map_err(kernel_error).map_err(stopping)?;
        let mut queues = mem::take(&mut self.queues);
        for (index, queue) in queues.iter_mut().enumerate() {
            let next = self.device.get_vring_base(index).map_err(kernel_error);
            let next = next.and_then(|next| u16::try_from(next).map_err(io::Error::other));
            queue.rings.set_next_avail(next.map_err(&reading)?);
            let used = queue.rings.used_idx(queue.memory.map(), Ordering::Acquire)?;
            queue.rings.set_next_used(used.0);
        }
        Ok(queues)
    }
}

impl Drop for ActiveBackend {
    fn drop(&mut self) {
        if let Err(error) = self.device.stop() {
            // The kernel refuses only a process that is not the owner.
            log::error!(
                "the vsock backend cannot be stopped and may write to guest memory: {error}"
            );
        }
    }
}

/// Device with the guest memory through which the `vhost` crate translates addresses.
struct BoundBackend<'a> {
    device: &'a KernelDevice,
    memory: &'a GuestMap,
}

impl AsRawFd for BoundBackend<'_> {
    fn as_raw_fd(&self) -> RawFd {
        self.device.as_raw_fd()
    }
}

impl<'a> VhostKernBackend for BoundBackend<'a> {
    type AS = &'a GuestMap;

    fn mem(&self) -> &Self::AS {
        &self.memory
    }

    /// Overrides the crate's default, which accepts a ring that spans two memory regions.
    fn is_valid(&self, config: &VringConfigData) -> bool {
        is_within_one_region(self.memory, config)
    }
}

/// Returns whether each part of the queue lies within one memory region, so that the kernel can
/// access it through an address of this process. [`Queue::new`] has validated everything else.
pub(super) fn is_within_one_region(
    memory: &GuestMemoryMmap<impl Bitmap + 'static>,
    config: &VringConfigData,
) -> bool {
    let size = usize::from(config.queue_size);
    // Section 2.7: entries, and in the rings flags, index and the event index.
    [
        (config.desc_table_addr, 16 * size),
        (config.avail_ring_addr, 6 + 2 * size),
        (config.used_ring_addr, 6 + 8 * size),
    ]
    .into_iter()
    .all(|(start, length)| memory.get_slice(GuestAddress(start), length).is_ok())
}

/// Returns the configuration of a queue in the format of the `vhost` crate.
fn vring_config(queue: &Queue) -> VringConfigData {
    let rings = &queue.rings;
    VringConfigData {
        queue_max_size: rings.max_size(),
        queue_size: rings.size(),
        desc_table_addr: rings.desc_table(),
        avail_ring_addr: rings.avail_ring(),
        used_ring_addr: rings.used_ring(),
        ..VringConfigData::default()
    }
}

/// Returns the location of each memory region in this process.
fn memory_table(memory: &GuestMap) -> Vec<VhostUserMemoryRegionInfo> {
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
