// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Targets of the virtio devices under a [hostile guest](crate::guest). Besides the absence of
//! panics, they check that a disk keeps its size, and that a read-only disk keeps its contents.

use std::{
    io::{Read as _, Seek as _, SeekFrom, Write as _},
    os::fd::OwnedFd,
};

use arbitrary::{Result, Unstructured};
use granule_types::units::Bytes;
use granule_vmm::devices::virtio::{
    VirtioDevice,
    balloon::Balloon,
    block::Block,
    console::Console,
    net::{Net, mac_from_tap_name},
    rng::Rng,
};

use crate::{
    bus::{self, DISK_SIZE},
    guest::HostileGuest,
};

pub fn block(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(is_read_only) = u.arbitrary() else { return };
    let contents: Vec<u8> = (0..=u8::MAX).cycle().take(DISK_SIZE).collect();
    let (disk, mut file) = bus::memory_disk(is_read_only, &contents);
    let _ = HostileGuest::new(Block::new(disk, "a disk"), u).run(|_| Ok(()));
    let mut after = Vec::new();
    file.seek(SeekFrom::Start(0)).expect("a file");
    file.read_to_end(&mut after).expect("a file");
    assert_eq!(after.len(), DISK_SIZE);
    assert!(!is_read_only || after == contents, "a read-only disk was written");
}

pub fn net(data: &[u8]) {
    let (tap, host) = bus::socket_tap();
    host.set_nonblocking(true).expect("a socket");
    let mut host = Some(host);
    run_guest(Net::new(tap, mac_from_tap_name("tap")), data, |u| {
        let Some(socket) = &host else { return Ok(()) };
        let mut packet = [0; 2048];
        match u.int_in_range(0..=7u8)? {
            0 => host = None,
            1 | 2 => while socket.recv(&mut packet).is_ok() {},
            _ => {
                let length = usize::from(u.arbitrary::<u16>()?) % packet.len();
                // A full socket loses packets.
                let _ = socket.send(&packet[..length]);
            }
        }
        Ok(())
    });
}

pub fn entropy(data: &[u8]) {
    run_guest(Rng, data, |_| Ok(()));
}

pub fn console(data: &[u8]) {
    let (input, keyboard) = std::io::pipe().expect("a pipe");
    rustix::io::ioctl_fionbio(&keyboard, true).expect("a pipe");
    rustix::io::ioctl_fionbio(&input, true).expect("a pipe");
    let device = Console::new(Some(OwnedFd::from(input)), Box::new(std::io::sink()), None);
    let mut keyboard = Some(keyboard);
    run_guest(device, data, |u| {
        match (u.int_in_range(0..=7u8)?, &mut keyboard) {
            (0, _) => keyboard = None,
            (_, Some(keyboard)) => {
                let length = usize::from(u.arbitrary::<u16>()?) % 5000;
                // A full pipe accepts no bytes.
                let _ = keyboard.write(&vec![b'x'; length]);
            }
            _ => {}
        }
        Ok(())
    });
}

pub fn balloon(data: &[u8]) {
    let balloon = Balloon::default();
    let handle = balloon.handle();
    run_guest(balloon, data, |u| {
        handle.set_target(Bytes(u.arbitrary()?));
        Ok(())
    });
}

/// Runs a guest on `device`; `host` acts on the backend of the device.
fn run_guest<'a>(
    device: impl VirtioDevice + 'static,
    data: &'a [u8],
    host: impl FnMut(&mut Unstructured<'a>) -> Result<()>,
) {
    let _ = HostileGuest::new(device, Unstructured::new(data)).run(host);
}
