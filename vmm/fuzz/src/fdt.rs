// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target `fdt`: device trees of VMs within and beyond the options of the command line, parsed by
//! the rules of the Devicetree Specification 0.4, chapter 5. The writer refuses a tree with an
//! error, or the tree is well formed and has a node with the same numbers for each of its inputs.

use std::ops::Range;

use arbitrary::{Arbitrary as _, Result, Unstructured};
use granule_types::units::{Bytes, GuestAddress};
use granule_vmm::{
    arch::aarch64::boot::{
        FDT_MAX_SIZE,
        fdt::{Fdt, GicRanges},
    },
    devices::{MmioDeviceInfo, Pl011, Rtc, Serial},
};

pub fn run(data: &[u8]) {
    if let Ok(inputs) = FdtInputs::generate(Unstructured::new(data)) {
        inputs.check();
    }
}

/// Inputs of a device tree.
struct FdtInputs {
    memory: Vec<(GuestAddress, Bytes)>,
    cpus: Vec<u64>,
    /// Set if the last CPU has a random affinity, which may be invalid.
    random_cpu: bool,
    gic: GicRanges,
    devices: Vec<MmioDeviceInfo>,
    initrd: Option<Range<GuestAddress>>,
    seed: Option<Vec<u8>>,
    pmu: bool,
    command_line: String,
}

impl FdtInputs {
    fn generate(mut source: Unstructured<'_>) -> Result<Self> {
        let u = &mut source;
        let mut memory = Vec::new();
        for _ in 0..u.int_in_range(0..=8)? {
            memory.push((GuestAddress(u.arbitrary()?), Bytes(u.arbitrary()?)));
        }
        let mut cpus: Vec<u64> = (0..u.int_in_range(0..=600)?).collect();
        let random_cpu = u.ratio(1, 8)?;
        if random_cpu {
            cpus.push(u.arbitrary()?);
        }
        let gic = match u.arbitrary()? {
            true => GicRanges::V3 {
                distributor: range(u)?,
                redistributors: range(u)?,
                its: u.arbitrary::<bool>()?.then(|| range(u)).transpose()?,
            },
            false => GicRanges::V2 { distributor: range(u)?, cpu_interface: range(u)? },
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
        Ok(Self {
            memory,
            cpus,
            random_cpu,
            gic,
            devices,
            initrd: u.arbitrary::<bool>()?.then(|| range(u)).transpose()?,
            seed: u.arbitrary()?,
            pmu: u.arbitrary()?,
            command_line: String::from_utf8_lossy(source.take_rest()).into_owned(),
        })
    }

    fn check(&self) {
        let fdt = Fdt {
            memory: &self.memory,
            cpus: &self.cpus,
            pmu: self.pmu,
            gic: &self.gic,
            devices: &self.devices,
            command_line: &self.command_line,
            initrd: self.initrd.clone(),
            seed: self.seed.as_deref(),
        };
        let bytes = match fdt.write() {
            Ok(bytes) => bytes,
            Err(error) => {
                let line = &self.command_line;
                let invalid_line = line.contains('\0');
                let expected = invalid_line || self.random_cpu || !self.has_unique_names();
                return assert!(expected, "{error}");
            }
        };
        assert!(bytes.len() as u64 <= FDT_MAX_SIZE.0);
        let properties = parse(&bytes);
        let count = |prefix: &str| {
            let nodes = properties.iter().filter(|p| p.0.starts_with(prefix));
            nodes.count()
        };
        assert_eq!(count("/memory@") / 2, self.memory.len());
        assert_eq!(count("/cpus/cpu@") / 4, self.cpus.len());
        let has = |node: &str, name: &str, value: &[u8]| {
            properties.iter().any(|p| p.0 == node && p.1 == name && p.2 == value)
        };
        let line = [self.command_line.as_bytes(), b"\0"].concat();
        assert!(has("/chosen", "bootargs", &line), "{}", self.command_line);
        for (start, size) in &self.memory {
            let node = format!("/memory@{:x}", start.0);
            let reg = [start.0.to_be_bytes(), size.0.to_be_bytes()].concat();
            assert!(has(&node, "reg", &reg), "{node}");
        }
    }

    /// Returns whether all nodes have different names, which a tree requires.
    fn has_unique_names(&self) -> bool {
        let memory = self.memory.iter().map(|(start, _)| format!("{start:?}"));
        let devices = self.devices.iter();
        let mut names: Vec<String> =
            memory.chain(devices.map(|d| format!("{}@{:x}", d.name, d.start.0))).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        names.len() == all
    }
}

fn range(u: &mut Unstructured<'_>) -> Result<Range<GuestAddress>> {
    let start = u64::from(u32::arbitrary(u)?);
    Ok(GuestAddress(start)..GuestAddress(start + u64::from(u32::arbitrary(u)?)))
}

/// Property of a node: path of the node, name, value.
type Property = (String, String, Vec<u8>);

/// Parses a tree and returns its properties.
///
/// # Panics
/// The tree is not well formed.
fn parse(bytes: &[u8]) -> Vec<Property> {
    let word = |at: usize| {
        let bytes: [u8; 4] = bytes[at..at + 4].try_into().expect("four bytes");
        u32::from_be_bytes(bytes) as usize
    };
    let text = |at: usize| {
        let end = bytes[at..].iter().position(|byte| *byte == 0);
        let end = end.expect("a terminated name") + at;
        std::str::from_utf8(&bytes[at..end]).expect("a name in UTF-8")
    };
    assert_eq!((word(0), word(4)), (0xd00d_feed, bytes.len()));
    let (mut at, strings) = (word(8), word(12));
    let (strings_size, size) = (word(32), word(36));
    assert!(strings + strings_size <= bytes.len() && at + size <= bytes.len());
    let (end, mut path) = (at + size, Vec::new());
    let mut properties = Vec::new();
    while at < end {
        let token = word(at);
        at += 4;
        match token {
            1 => {
                let name = text(at);
                path.push(name.to_owned());
                at = (at + name.len() + 1).next_multiple_of(4);
            }
            2 => assert!(path.pop().is_some(), "an end of a node without its start"),
            3 => {
                let (length, name) = (word(at), word(at + 4));
                assert!(name < strings_size);
                let value = bytes[at + 8..at + 8 + length].to_vec();
                let node = path.join("/");
                properties.push((node, text(strings + name).to_owned(), value));
                at = (at + 8 + length).next_multiple_of(4);
            }
            9 => {
                assert!(path.is_empty() && at == end);
                return properties;
            }
            other => panic!("token {other} at {at:#x}"),
        }
    }
    panic!("no end token");
}
