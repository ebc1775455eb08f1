// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Loads and stores of any size anywhere: in every device's registers and around them. The virtio
//! devices have their real transports, so the right stores start their threads and a store of 0
//! ends them.

use std::{
    fs::File,
    io::{Write as _, sink},
    os::{fd::AsRawFd as _, unix::net::UnixDatagram},
    path::PathBuf,
    sync::Arc,
    time::Instant,
};

use arbitrary::{Result, Unstructured};
use granule_vmm::devices::{
    BootTimer, Bus, MmioDevice, Pl011, Rtc, Serial,
    serial::SerialPort as _,
    virtio::{
        Transport, VirtioDevice,
        balloon::Balloon,
        block::{Block, Disk},
        console::Console,
        net::{Net, Tap, mac_for},
        rng::Rng,
    },
};
use granule_vmm::memory::GuestMemory;
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, memfd_create};
use vmm_sys_util::eventfd::EventFd;

use crate::guest;

const PLATFORM: u64 = 0x900_0000;
const PLATFORM_STEP: u64 = 0x1_0000;
/// The first virtio device's registers.
pub const VIRTIO: u64 = 0xa00_0000;
/// From one virtio device to the next.
pub const VIRTIO_STEP: u64 = 0x1000;
/// Virtio devices in their order: how many queues each has.
pub const QUEUES: [u32; 5] = [1, 2, 1, 4, 2];
/// Which of them gives random numbers.
pub const ENTROPY: u64 = 2;

pub(crate) fn run(data: &[u8]) {
    let Machine { bus, serial, .. } = machine();
    let _ = play(&bus, &serial, &mut Unstructured::new(data));
    let _ = bus.refused();
}

fn play(bus: &Bus, serial: &Mutex<Serial>, u: &mut Unstructured<'_>) -> Result<()> {
    while !u.is_empty() {
        let address = match u.int_in_range(0..=7u8)? {
            0 => u.arbitrary()?,
            1 | 2 => PLATFORM + u.int_in_range(0..=3)? * PLATFORM_STEP + offset(u)?,
            _ => VIRTIO + u.int_in_range(0..=4)? * VIRTIO_STEP + offset(u)?,
        };
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

/// A register: mostly one of the first, which are those that do something.
fn offset(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=7u8)? {
        0 => u64::from(u.arbitrary::<u16>()?),
        1 => 0x70,
        2 => 0x50,
        _ => u64::from(u.arbitrary::<u8>()?) & !3,
    })
}

fn event() -> EventFd {
    EventFd::new(libc::EFD_NONBLOCK).expect("an event")
}

/// Devices on a bus.
#[derive(Debug)]
pub struct Machine {
    /// All of them.
    pub bus: Bus,
    /// The memory that requests lie in.
    pub memory: Arc<GuestMemory>,
    serial: Arc<Mutex<Serial>>,
    /// The other end of the network card.
    _packets: UnixDatagram,
}

/// One device of each kind that `granule run` has and serves itself (a vsock's queues are the host
/// kernel's).
///
/// # Panics
/// The host has no event, socket or memory to give.
#[must_use]
pub fn machine() -> Machine {
    let mut bus = Bus::new();
    let serial = Arc::new(Mutex::new(Serial::new(event(), Box::new(sink()))));
    let places = [0, 1, 2, 3].map(|at| PLATFORM + at * PLATFORM_STEP);
    let timer = BootTimer::new(Instant::now(), Box::new(|_, _| {}));
    let platform: [(_, Arc<Mutex<dyn MmioDevice>>); 4] = [
        (Serial::describe(places[0], 0), Arc::clone(&serial) as _),
        (
            Pl011::describe(places[1], 1),
            Arc::new(Mutex::new(Pl011::new(event(), Box::new(sink())))),
        ),
        (Rtc::describe(places[2]), Arc::new(Mutex::new(Rtc::new()))),
        (BootTimer::describe(places[3]), Arc::new(Mutex::new(timer))),
    ];
    for (description, device) in platform {
        bus.add(description, device).expect("a place");
    }
    let memory = guest::memory();
    let (tap, packets) = UnixDatagram::pair().expect("a socket");
    tap.set_nonblocking(true).expect("a socket");
    let virtio: [(_, Box<dyn VirtioDevice>); 5] = [
        ("disk0", Box::new(Block::new(disk(), "disk0"))),
        (
            "net0",
            Box::new(Net::new(Tap::from_fd(tap.into(), "tap"), mac_for("tap"))),
        ),
        ("entropy", Box::new(Rng::default())),
        ("balloon", Box::new(Balloon::new().expect("an event"))),
        ("console", Box::new(Console::new(None, Box::new(sink())))),
    ];
    for (index, (name, device)) in (0u32..).zip(virtio) {
        let transport = Transport::new(name, device, Arc::clone(&memory), event()).expect("events");
        let start = VIRTIO + u64::from(index) * VIRTIO_STEP;
        let description = transport.describe(start, 4 + index);
        bus.add(description, Arc::new(Mutex::new(transport)))
            .expect("a place");
    }
    Machine {
        bus,
        memory,
        serial,
        _packets: packets,
    }
}

fn disk() -> Disk {
    let file = memfd_create(c"disk", MemfdFlags::CLOEXEC).expect("a file in memory");
    let mut file = File::from(file);
    file.write_all(&[0; 1 << 16]).expect("room");
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    Disk::open(&path, false).expect("a disk")
}
