// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Each virtio device under a [hostile guest](crate::guest), and what must hold beside "no panic":
//! a disk keeps its size and one that is read-only its contents, a packet from the host arrives in
//! order or not at all, a guest gets no more of the input than there was.

use std::{
    ffi::CString,
    fs::File,
    io::{Read as _, Seek as _, SeekFrom, Write as _},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::net::UnixDatagram,
    },
    path::PathBuf,
};

use arbitrary::{Result, Unstructured};
use granule_types::units::Bytes;
use granule_vmm::devices::virtio::{
    balloon::Balloon,
    block::{Block, Disk},
    console::Console,
    net::{Net, Tap, mac_for},
    rng::Rng,
};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::guest::Guest;

const DISK: usize = 1 << 16;

pub fn block(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(read_only) = u.arbitrary() else { return };
    let mut file = memory_file();
    let content: Vec<u8> = (0..=u8::MAX).cycle().take(DISK).collect();
    file.write_all(&content).expect("room");
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let disk = Disk::open(&path, read_only).expect("a disk");
    if let Ok(mut guest) = Guest::new(Block::new(disk, "a disk"), &mut u) {
        let _ = guest.live(|_, _| Ok(()));
    }
    let mut after = Vec::new();
    file.seek(SeekFrom::Start(0)).expect("a file");
    file.read_to_end(&mut after).expect("a file");
    assert_eq!(after.len(), DISK);
    assert!(
        !read_only || after == content,
        "a read-only disk was written"
    );
}

pub fn net(data: &[u8]) {
    let (tap, host) = UnixDatagram::pair().expect("a socket");
    tap.set_nonblocking(true).expect("a socket");
    host.set_nonblocking(true).expect("a socket");
    let card = Net::new(Tap::from_fd(tap.into(), "tap"), mac_for("tap"));
    let mut host = Some(host);
    drive(card, data, |_, u| {
        let Some(end) = &host else { return Ok(()) };
        let mut packet = [0; 2048];
        match u.int_in_range(0..=7u8)? {
            0 => host = None,
            1 | 2 => while end.recv(&mut packet).is_ok() {},
            _ => {
                let length = usize::from(u.arbitrary::<u16>()?) % packet.len();
                // A full queue loses packets.
                let _ = end.send(&packet[..length]);
            }
        }
        Ok(())
    });
}

pub fn entropy(data: &[u8]) {
    drive(Rng::default(), data, |_, _| Ok(()));
}

pub fn console(data: &[u8]) {
    let (input, keyboard) = std::io::pipe().expect("a pipe");
    rustix::io::ioctl_fionbio(&keyboard, true).expect("a pipe");
    rustix::io::ioctl_fionbio(&input, true).expect("a pipe");
    let device = Console::new(Some(OwnedFd::from(input)), Box::new(std::io::sink()));
    let mut keyboard = Some(keyboard);
    drive(device, data, |_, u| {
        match (u.int_in_range(0..=7u8)?, &mut keyboard) {
            (0, _) => keyboard = None,
            (_, Some(keyboard)) => {
                let length = usize::from(u.arbitrary::<u16>()?) % 5000;
                // A full pipe takes no more.
                let _ = keyboard.write(&vec![b'x'; length]);
            }
            _ => {}
        }
        Ok(())
    });
}

pub fn balloon(data: &[u8]) {
    let balloon = Balloon::new().expect("an event");
    let handle = balloon.handle();
    drive(balloon, data, |_, u| {
        match u.arbitrary()? {
            true => handle.set_target(Bytes(u.arbitrary()?)),
            false => assert!(handle.statistics().len() <= 32),
        }
        Ok(())
    });
}

fn drive<D: granule_vmm::devices::virtio::VirtioDevice>(
    device: D,
    data: &[u8],
    host: impl FnMut(&mut D, &mut Unstructured<'_>) -> Result<()>,
) {
    let mut u = Unstructured::new(data);
    if let Ok(mut guest) = Guest::new(device, &mut u) {
        let _ = guest.live(host);
    }
}

fn memory_file() -> File {
    let name = CString::new("disk").expect("a name");
    let file = memfd_create(&name, MemfdFlags::CLOEXEC);
    file.expect("a file in memory").into()
}
