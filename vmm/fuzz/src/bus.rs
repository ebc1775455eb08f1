// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target `bus`: loads and stores of any size in and around the registers of every device. The
//! virtio devices have their real transports, so that some stores start and stop worker threads.

use std::{
    fs::File,
    io::{Write as _, sink},
    os::{fd::AsRawFd as _, unix::net::UnixDatagram},
    path::PathBuf,
    sync::Arc,
};

use arbitrary::{Result, Unstructured};
use granule_types::units::GuestAddress;
use granule_vmm::{
    arch::{PLATFORM_DEVICE_STEP, PLATFORM_DEVICES, VIRTIO_DEVICES},
    devices::{
        BootTimer, Bus, MmioDevice, Pl011, REGISTER_RANGE_SIZE, Rtc, Serial,
        serial::SerialPort as _,
        virtio::{
            Transport, VirtioDevice,
            balloon::Balloon,
            block::{Block, Disk},
            console::Console,
            net::{Net, Tap, mac_from_tap_name},
            rng::Rng,
        },
    },
};
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::guest::{self, event};

pub const DISK_SIZE: usize = 1 << 16;

pub fn run(data: &[u8]) {
    let (bus, serial, _packets) = device_bus();
    let _ = access_registers(&bus, &serial, &mut Unstructured::new(data));
}

fn access_registers(bus: &Bus, serial: &Mutex<Serial>, u: &mut Unstructured<'_>) -> Result<()> {
    while !u.is_empty() {
        let address = match u.int_in_range(0..=7u8)? {
            0 => u.arbitrary()?,
            1 | 2 => {
                PLATFORM_DEVICES.start.0
                    + u.int_in_range(0..=3)? * PLATFORM_DEVICE_STEP
                    + register_offset(u)?
            }
            _ => {
                VIRTIO_DEVICES.start.0
                    + u.int_in_range(0..=4)? * REGISTER_RANGE_SIZE
                    + register_offset(u)?
            }
        };
        let address = GuestAddress(address);
        let length = match u.int_in_range(0..=7u8)? {
            0 => u.int_in_range(0..=16)?,
            1 => 1,
            2 => 8,
            _ => 4,
        };
        match u.int_in_range(0..=3u8)? {
            0 => {
                let mut data = [0xff; 16];
                bus.read(address, &mut data[..length]);
                assert!(data[length..].iter().all(|byte| *byte == 0xff));
            }
            1 if u.ratio(1, 4)? => {
                serial.lock().receive(&[0; 16]);
            }
            _ => {
                let value: u128 = match u.arbitrary()? {
                    true => u.int_in_range(0..=16)?,
                    false => u.arbitrary()?,
                };
                bus.write(address, &value.to_le_bytes()[..length]);
            }
        }
    }
    Ok(())
}

/// Returns a register offset. Most registers have low offsets.
fn register_offset(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=7u8)? {
        0 => u64::from(u.arbitrary::<u16>()?),
        1 => 0x70,
        2 => 0x50,
        _ => u64::from(u.arbitrary::<u8>()?) & !3,
    })
}

/// Returns a bus with one device of each type that `granule run` emulates, its serial port, and the
/// host's end of its tap. A vsock is absent, because the host's kernel serves its queues.
fn device_bus() -> (Bus, Arc<Mutex<Serial>>, UnixDatagram) {
    let mut bus = Bus::default();
    let serial = Serial::new(event(), Box::new(sink())).expect("an event");
    let serial = Arc::new(Mutex::new(serial));
    let address = |index| GuestAddress(PLATFORM_DEVICES.start.0 + index * PLATFORM_DEVICE_STEP);
    let pl011 = Pl011::new(event(), Box::new(sink())).expect("an event");
    let timer = BootTimer::new(Box::new(|_| {}));
    let platform: [(_, Arc<Mutex<dyn MmioDevice>>); 4] = [
        (Serial::describe(address(0), 0), Arc::clone(&serial) as _),
        (Pl011::describe(address(1), 1), Arc::new(Mutex::new(pl011))),
        (Rtc::describe(address(2)), Arc::new(Mutex::new(Rtc::default()))),
        (BootTimer::describe(address(3)), Arc::new(Mutex::new(timer))),
    ];
    for (info, device) in platform {
        bus.add(info, device).expect("a free address");
    }
    let memory = guest::zeroed_memory();
    let (tap, packets) = socket_tap();
    let (disk, _) = memory_disk(false, &[0; DISK_SIZE]);
    let virtio: [(_, Box<dyn VirtioDevice>); 5] = [
        ("disk0", Box::new(Block::new(disk, "disk0"))),
        ("net0", Box::new(Net::new(tap, mac_from_tap_name("tap")))),
        ("entropy", Box::new(Rng)),
        ("balloon", Box::new(Balloon::default())),
        ("console", Box::new(Console::new(None, Box::new(sink()), None))),
    ];
    for (index, (name, device)) in (0u32..).zip(virtio) {
        let transport = Transport::new(name, device, Arc::clone(&memory), event()).expect("events");
        let start = GuestAddress(VIRTIO_DEVICES.start.0 + u64::from(index) * REGISTER_RANGE_SIZE);
        let info = transport.describe(start, 4 + index);
        bus.add(info, Arc::new(Mutex::new(transport))).expect("a free address");
    }
    (bus, serial, packets)
}

/// Returns a disk in memory with these contents, and its file.
pub fn memory_disk(is_read_only: bool, contents: &[u8]) -> (Disk, File) {
    let file = memfd_create(c"disk", MemfdFlags::CLOEXEC).expect("a memory file");
    let mut file = File::from(file);
    file.write_all(contents).expect("memory");
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    (Disk::open(&path, is_read_only).expect("a disk"), file)
}

/// Returns a socket in place of a tap, and its peer on the host.
pub fn socket_tap() -> (Tap, UnixDatagram) {
    let (tap, host) = UnixDatagram::pair().expect("a socket");
    tap.set_nonblocking(true).expect("a socket");
    (Tap::from_fd(tap.into(), "tap"), host)
}
