// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Device trees: of any machine that the command line could describe, written and read back by the
//! rules of the Devicetree Specification 0.4, chapter 5. A tree is refused with an error or it is
//! well formed, has a node for everything it was made from, and tells the same numbers.

use arbitrary::{Arbitrary as _, Result, Unstructured};
use granule_types::units::{Bytes, GuestAddress};
use granule_vmm::{
    arch::aarch64::boot::{
        fdt::{Fdt, Gic},
        layout::FDT_MAX_SIZE,
    },
    devices::{MmioDeviceInfo, Pl011, Rtc, Serial},
};

pub fn run(data: &[u8]) {
    let _ = build(Unstructured::new(data));
}

fn build(mut source: Unstructured<'_>) -> Result<()> {
    let u = &mut source;
    let mut memory = Vec::new();
    for _ in 0..u.int_in_range(0..=8)? {
        memory.push((GuestAddress(u.arbitrary()?), Bytes(u.arbitrary()?)));
    }
    let mut cpus: Vec<u64> = Vec::new();
    for index in 0..u.int_in_range(0..=600)? {
        cpus.push(index);
    }
    let wild = u.ratio(1, 8)?;
    if wild {
        cpus.push(u.arbitrary()?);
    }
    let range = |u: &mut Unstructured<'_>| -> Result<_> {
        let start = u64::from(u32::arbitrary(u)?);
        Ok(start..start + u64::from(u32::arbitrary(u)?))
    };
    let gic = match u.arbitrary()? {
        true => Gic::V3 {
            distributor: range(u)?,
            redistributors: range(u)?,
            its: u.arbitrary::<bool>()?.then(|| range(u)).transpose()?,
        },
        false => Gic::V2 {
            distributor: range(u)?,
            cpu_interface: range(u)?,
        },
    };
    let mut devices = Vec::new();
    for number in 0..u.int_in_range(0..=12u32)? {
        devices.push(match u.int_in_range(0..=3)? {
            0 => Serial::describe(GuestAddress(u.arbitrary()?), number),
            1 => Pl011::describe(GuestAddress(u.arbitrary()?), number),
            2 => Rtc::describe(GuestAddress(u.arbitrary()?)),
            _ => MmioDeviceInfo {
                name: format!("disk{number}"),
                start: GuestAddress(u.arbitrary()?),
                size: u.arbitrary()?,
                irq: u.arbitrary()?,
                compatible: &["virtio,mmio"],
            },
        });
    }
    let initrd = u.arbitrary::<bool>()?.then(|| range(u)).transpose()?;
    let seed: Option<Vec<u8>> = u.arbitrary()?;
    let pmu = u.arbitrary()?;
    let command_line = String::from_utf8_lossy(source.take_rest()).into_owned();
    let tree = Fdt {
        memory: &memory,
        cpus: &cpus,
        pmu,
        gic: &gic,
        devices: &devices,
        command_line: &command_line,
        initrd,
        seed: seed.as_deref(),
    };
    let bytes = match tree.write() {
        Ok(bytes) => bytes,
        Err(error) => {
            let reason = command_line.contains('\0') || command_line.len() >= 2048;
            assert!(reason || wild || !unique(&memory, &devices), "{error}");
            return Ok(());
        }
    };
    assert!(bytes.len() as u64 <= FDT_MAX_SIZE.0);
    let found = read(&bytes);
    let count = |prefix: &str| found.iter().filter(|p| p.0.starts_with(prefix)).count();
    assert_eq!(count("/memory@") / 2, memory.len());
    assert_eq!(count("/cpus/cpu@") / 4, cpus.len());
    let line = found.iter().find(|p| p.0 == "/chosen" && p.1 == "bootargs");
    let line = line.map(|p| p.2.as_slice());
    assert_eq!(
        line,
        Some([command_line.as_bytes(), b"\0"].concat().as_slice())
    );
    for (start, size) in &memory {
        let node = format!("/memory@{:x}", start.0);
        let reg = [start.0.to_be_bytes(), size.0.to_be_bytes()].concat();
        let told = found
            .iter()
            .any(|p| p.0 == node && p.1 == "reg" && p.2 == reg);
        assert!(told, "{node}");
    }
    Ok(())
}

/// Whether no two nodes would have one name, which a tree must not hold.
fn unique(memory: &[(GuestAddress, Bytes)], devices: &[MmioDeviceInfo]) -> bool {
    let mut names: Vec<String> = memory
        .iter()
        .map(|(start, _)| format!("{start:?}"))
        .collect();
    names.extend(
        devices
            .iter()
            .map(|d| format!("{}@{:x}", d.name, d.start.0)),
    );
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    names.len() == all
}

/// A property: its node's path, its name, its value.
type Property = (String, String, Vec<u8>);

/// Reads a tree; panics where it is not well formed.
fn read(bytes: &[u8]) -> Vec<Property> {
    let word = |at: usize| {
        let bytes: [u8; 4] = bytes[at..at + 4].try_into().expect("four bytes");
        u32::from_be_bytes(bytes) as usize
    };
    let text = |at: usize| {
        let end = bytes[at..].iter().position(|byte| *byte == 0);
        let end = end.expect("a name ends") + at;
        std::str::from_utf8(&bytes[at..end]).expect("a name is text")
    };
    assert_eq!((word(0), word(4)), (0xd00d_feed, bytes.len()));
    let (mut at, strings) = (word(8), word(12));
    let (strings_size, size) = (word(32), word(36));
    assert!(strings + strings_size <= bytes.len() && at + size <= bytes.len());
    let (end, mut path) = (at + size, Vec::new());
    let mut found = Vec::new();
    while at < end {
        let token = word(at);
        at += 4;
        match token {
            1 => {
                let name = text(at);
                path.push(name.to_owned());
                at = (at + name.len() + 1).next_multiple_of(4);
            }
            2 => assert!(path.pop().is_some(), "a node ends that never began"),
            3 => {
                let (length, name) = (word(at), word(at + 4));
                assert!(name < strings_size);
                let value = bytes[at + 8..at + 8 + length].to_vec();
                let node = path.join("/");
                found.push((node, text(strings + name).to_owned(), value));
                at = (at + 8 + length).next_multiple_of(4);
            }
            9 => {
                assert!(path.is_empty() && at == end);
                return found;
            }
            other => panic!("token {other} at {at:#x}"),
        }
    }
    panic!("it has no end");
}
