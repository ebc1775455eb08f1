// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target of files of changes to a snapshot's memory: any bytes, with the length and the checksum that
//! the state names. What is accepted fits the memory.

use std::{fs::File, io::Write as _, sync::Arc};

use flate2::Crc;
use granule_types::units::Bytes;
use granule_vmm::memory::{changes::ChangesData, layers::LayeredImage};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::guest;

pub fn run(data: &[u8]) {
    let memory = guest::zeroed_memory();
    let (size, base) = (memory.size(), file());
    base.set_len(size.0).expect("an image without data");
    let mut layers = LayeredImage::from(Arc::new(base));
    // The second file hides a part of the first one.
    for part in [data, &data[..data.len() / 2]] {
        let mut changes = file();
        changes.write_all(part).expect("a file in memory");
        let mut crc = Crc::new();
        crc.update(part);
        let expected = ChangesData { bytes: Bytes(part.len() as u64), crc: crc.sum() };
        let other = ChangesData { crc: !crc.sum(), ..expected };
        let changes = Arc::new(changes);
        assert!(part.is_empty() || layers.add(Arc::clone(&changes), other, size).is_err());
        if layers.add(changes, expected, size).is_err() {
            return;
        }
    }
    layers.apply_changes(&memory).expect("parts within the memory");
}

fn file() -> File {
    memfd_create("granule-fuzz", MemfdFlags::CLOEXEC).expect("a file in memory").into()
}
