// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! KVM statistics of a VM and its vCPUs (`KVM_GET_STATS_FD`, `Documentation/virt/kvm/api.rst`
//! 4.133; since Linux 5.14).
//!
//! The header of a statistics file holds the offsets of descriptors and data; a descriptor holds a
//! name. Only statistics of faults, mappings, TLB flushes and exits are read. They are selected by
//! name prefix, because names depend on the architecture. A VM's statistics are named `vm.NAME`;
//! those of all vCPUs are summed as `vcpu.NAME`.
//!
//! Some implementations of KVM export statistics without counting them. After a guest has run,
//! fault and page statistics that are all zero are therefore removed.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::FileExt,
    },
};

use kvm_bindings::{
    KVM_STATS_TYPE_CUMULATIVE, KVM_STATS_TYPE_INSTANT, KVM_STATS_TYPE_MASK, KVMIO, kvm_stats_desc,
    kvm_stats_header,
};
use kvm_ioctls::{VcpuFd, VmFd};
use vmm_sys_util::{errno, ioctl::ioctl, ioctl_io_nr};

use super::KvmError;

mod ioctl_number {
    //! Ioctl number, in a module of its own because the macro defines an undocumented function.
    #![allow(missing_docs, reason = "defined by the macro")]

    use super::{KVMIO, ioctl_io_nr};

    ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);
}

/// Type of a statistic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatisticKind {
    /// A counter that only grows (`KVM_STATS_TYPE_CUMULATIVE`).
    Cumulative,
    /// A value that rises and falls (`KVM_STATS_TYPE_INSTANT`).
    Instant,
}

/// The name, type and data offset of a statistic.
#[derive(Debug, Clone, PartialEq, Eq)]
struct StatisticField {
    name: String,
    kind: StatisticKind,
    offset: u64,
}

/// A statistics file and its selected fields.
#[derive(Debug)]
struct StatisticsFile {
    file: File,
    fields: Vec<StatisticField>,
}

/// The statistics of one VM and its vCPUs.
#[derive(Debug, Default)]
pub struct Statistics {
    files: Vec<StatisticsFile>,
}

impl Statistics {
    /// Adds the statistics of a VM, if the kernel exports them.
    pub fn add_vm(&mut self, vm: &VmFd) {
        self.add_file("vm", vm);
    }

    /// Adds the statistics of a vCPU, if the kernel exports them.
    pub fn add_vcpu(&mut self, vcpu: &VcpuFd) {
        self.add_file("vcpu", vcpu);
    }

    fn add_file(&mut self, owner: &str, fd: &impl AsRawFd) {
        match open_statistics(fd).and_then(|file| read_descriptors(owner, file)) {
            Ok(file) => self.files.push(file),
            Err(reason) => log::debug!("no statistics of a {owner}: {reason}"),
        }
    }

    /// Removes the fault (`pf_*`) or page (`pages_*`) statistics if all are 0. Call it after the
    /// guest has run.
    pub fn remove_uncounted(&mut self) -> Result<(), KvmError> {
        for (kind, family) in
            [(StatisticKind::Cumulative, ".pf_"), (StatisticKind::Instant, ".pages_")]
        {
            let is_of = |name: &str| name.contains(family);
            if self.read(kind)?.iter().any(|(n, sum)| is_of(n) && *sum > 0) {
                continue;
            }
            for file in &mut self.files {
                file.fields.retain(|field| !is_of(&field.name));
            }
            log::debug!("this KVM does not count *{family}*: left out");
        }
        Ok(())
    }

    /// Returns every statistic of a type, summed by name.
    pub fn read(&self, kind: StatisticKind) -> Result<BTreeMap<String, u64>, KvmError> {
        let mut sums = BTreeMap::new();
        for file in &self.files {
            for field in file.fields.iter().filter(|field| field.kind == kind) {
                let mut bytes = [0; 8];
                let read = file.file.read_exact_at(&mut bytes, field.offset);
                read.map_err(KvmError::ReadStatistics)?;
                *sums.entry(field.name.clone()).or_insert(0) += u64::from_le_bytes(bytes);
            }
        }
        Ok(sums)
    }
}

fn open_statistics(fd: &impl AsRawFd) -> io::Result<File> {
    // SAFETY: the ioctl has no argument and fails on other file descriptors and older kernels.
    let file = unsafe { ioctl(fd, ioctl_number::KVM_GET_STATS_FD()) };
    if file < 0 {
        return Err(errno::Error::last().into());
    }
    // SAFETY: the ioctl returned a new file descriptor, which nothing else owns.
    Ok(unsafe { File::from_raw_fd(file) })
}

fn read_descriptors(owner: &str, mut file: File) -> io::Result<StatisticsFile> {
    let mut header = [0; size_of::<kvm_stats_header>()];
    file.read_exact(&mut header)?;
    let [_, name_size, count, _, descriptors, data] = first_words(&header);
    let size = size_of::<kvm_stats_desc>() + usize::try_from(name_size).unwrap_or(0);
    let mut bytes = vec![0; size * usize::try_from(count).unwrap_or(0)];
    file.read_exact_at(&mut bytes, descriptors.into())?;
    let fields = bytes
        .chunks_exact(size)
        .filter_map(|descriptor| parse_descriptor(owner, data, descriptor))
        .collect();
    Ok(StatisticsFile { file, fields })
}

fn first_words(bytes: &[u8]) -> [u32; 6] {
    let mut words = [0; 6];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    words
}

/// Parses a descriptor: flags, exponent and number of values, data offset, bucket size, name.
/// Returns `None` for statistics that are not selected.
fn parse_descriptor(owner: &str, data: u32, descriptor: &[u8]) -> Option<StatisticField> {
    let (head, name) = descriptor.split_at_checked(size_of::<kvm_stats_desc>())?;
    let name = name.split(|byte| *byte == 0).next()?;
    let name = std::str::from_utf8(name).ok()?;
    let [flags, exponent_and_values, offset, ..] = first_words(head);
    let kind = match flags & KVM_STATS_TYPE_MASK {
        KVM_STATS_TYPE_CUMULATIVE => StatisticKind::Cumulative,
        KVM_STATS_TYPE_INSTANT => StatisticKind::Instant,
        _ => return None,
    };
    (is_selected(name) && exponent_and_values >> 16 == 1).then(|| StatisticField {
        name: format!("{owner}.{name}"),
        kind,
        offset: u64::from(data) + u64::from(offset),
    })
}

/// Returns whether a statistic counts faults, mappings, TLB flushes or exits.
fn is_selected(name: &str) -> bool {
    ["pf_", "pages_", "mmu_", "nx_lpage"].iter().any(|prefix| name.starts_with(prefix))
        || name.contains("tlb_flush")
        || name == "exits"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(flags: u32, values: u16, offset: u32, name: &str) -> Vec<u8> {
        let mut bytes = flags.to_le_bytes().to_vec();
        bytes.extend([0, 0]);
        bytes.extend(values.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(name.as_bytes());
        bytes.resize(16 + 48, 0);
        bytes
    }

    #[test]
    fn counters_and_gauges_of_faults_and_mappings_are_selected() {
        let selected =
            |name: &str, kind, offset| Some(StatisticField { name: name.to_owned(), kind, offset });
        let (counter, gauge) = (KVM_STATS_TYPE_CUMULATIVE, KVM_STATS_TYPE_INSTANT);
        for (descriptor, expected) in [
            (
                descriptor(counter, 1, 8, "pf_taken"),
                selected("vcpu.pf_taken", StatisticKind::Cumulative, 0x108),
            ),
            (
                descriptor(gauge, 1, 16, "pages_2m"),
                selected("vcpu.pages_2m", StatisticKind::Instant, 0x110),
            ),
            (descriptor(counter, 32, 0, "pf_hist"), None),
            (descriptor(counter, 1, 0, "halt_wakeup"), None),
            (descriptor(2, 1, 0, "pages_peak"), None),
            (vec![0; 3], None),
        ] {
            assert_eq!(parse_descriptor("vcpu", 0x100, &descriptor), expected);
        }
    }

    fn statistics(values: &[(&str, StatisticKind, u64)]) -> Statistics {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.2.to_le_bytes()).collect();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        let field = |(index, (name, kind, _)): (usize, &(&str, StatisticKind, u64))| {
            StatisticField { name: (*name).to_owned(), kind: *kind, offset: index as u64 * 8 }
        };
        let fields = values.iter().enumerate().map(field).collect();
        Statistics { files: vec![StatisticsFile { file, fields }] }
    }

    fn names(statistics: &Statistics) -> Vec<String> {
        [StatisticKind::Cumulative, StatisticKind::Instant]
            .into_iter()
            .flat_map(|kind| statistics.read(kind).unwrap().into_keys())
            .collect()
    }

    #[test]
    fn statistics_that_are_all_zero_are_removed() {
        let mut none = statistics(&[
            ("vcpu.exits", StatisticKind::Cumulative, 0),
            ("vcpu.pf_taken", StatisticKind::Cumulative, 0),
            ("vm.pages_4k", StatisticKind::Instant, 0),
        ]);
        let mut some = statistics(&[
            ("vcpu.pf_fast", StatisticKind::Cumulative, 0),
            ("vcpu.pf_taken", StatisticKind::Cumulative, 3),
            ("vm.pages_2m", StatisticKind::Instant, 0),
            ("vm.pages_4k", StatisticKind::Instant, 9),
        ]);
        let all = names(&some);

        none.remove_uncounted().unwrap();
        some.remove_uncounted().unwrap();

        assert_eq!(names(&none), ["vcpu.exits"]);
        assert_eq!(names(&some), all);
    }
}
