// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! KVM's own statistics of a VM and its vCPUs (`KVM_GET_STATS_FD`, the kernel's
//! `Documentation/virt/kvm/api.rst` 4.133; since Linux 5.14).
//!
//! A statistics file begins with a header; it tells where descriptors (each with a name) and data
//! lie. Each value is read anew each time. The statistics worth having are those
//! of faults and mappings: they are recognised by their names, as each architecture has its own.
//! A VM's are called `vm.NAME`, those of the vCPUs are added up as `vcpu.NAME`.
//!
//! A KVM with a fault path of its own offers them all and counts nothing there. A guest that has run
//! has faulted and has pages mapped; where statistics still say that none was, they are left out.

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
use thiserror::Error;
use vmm_sys_util::{errno, ioctl::ioctl, ioctl_io_nr};

mod number {
    //! The macro makes a public function without documentation.
    #![allow(missing_docs, reason = "made by the macro")]

    use super::{KVMIO, ioctl_io_nr};

    ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);
}

/// What a statistic is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatisticKind {
    /// It only grows: how often something happened.
    Cumulative,
    /// It rises and falls: how much there is now.
    Instant,
}

/// A statistics file could not be read.
#[derive(Debug, Error)]
#[error("a statistics file of KVM's cannot be read; run without events")]
pub struct StatisticsError(#[from] io::Error);

/// One statistic: what it is called, and where it lies in a data block.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Field {
    name: String,
    kind: StatisticKind,
    offset: u64,
}

/// One file.
#[derive(Debug)]
struct Source {
    file: File,
    fields: Vec<Field>,
}

/// The statistics of one VM.
#[derive(Debug, Default)]
pub struct Statistics {
    sources: Vec<Source>,
}

impl Statistics {
    /// No statistics: each is absent.
    pub fn none() -> Self {
        Self::default()
    }

    /// Adds those of a VM, if the kernel has them.
    pub fn add_vm(&mut self, vm: &VmFd) {
        self.add("vm", vm);
    }

    /// Adds those of a vCPU, if the kernel has them.
    pub fn add_vcpu(&mut self, vcpu: &VcpuFd) {
        self.add("vcpu", vcpu);
    }

    fn add(&mut self, owner: &str, fd: &impl AsRawFd) {
        match open(fd).and_then(|file| describe(owner, file)) {
            Ok(source) => self.sources.push(source),
            Err(reason) => log::debug!("no statistics of a {owner}: {reason}"),
        }
    }

    /// Leaves out what this KVM offers and does not count: faults (`pf_*`) and mapped pages
    /// (`pages_*`), where all of them are 0. To be called once the guest has run.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn leave_out_uncounted(&mut self) -> Result<(), StatisticsError> {
        for (kind, family) in [
            (StatisticKind::Cumulative, ".pf_"),
            (StatisticKind::Instant, ".pages_"),
        ] {
            let is_of = |name: &str| name.contains(family);
            if self.read(kind)?.iter().any(|(n, sum)| is_of(n) && *sum > 0) {
                continue;
            }
            for source in &mut self.sources {
                source.fields.retain(|field| !is_of(&field.name));
            }
            log::debug!("this KVM counts none of *{family}*: left out");
        }
        Ok(())
    }

    /// Every statistic of this kind, those of the same name added up.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn read(&self, kind: StatisticKind) -> Result<BTreeMap<String, u64>, StatisticsError> {
        let mut sums = BTreeMap::new();
        for source in &self.sources {
            for field in source.fields.iter().filter(|field| field.kind == kind) {
                let mut bytes = [0; 8];
                source.file.read_exact_at(&mut bytes, field.offset)?;
                *sums.entry(field.name.clone()).or_insert(0) += u64::from_le_bytes(bytes);
            }
        }
        Ok(sums)
    }
}

/// Opens the statistics of a VM or vCPU.
fn open(fd: &impl AsRawFd) -> io::Result<File> {
    // SAFETY: the call takes no argument; another kind of descriptor, or an older kernel, refuses.
    let file = unsafe { ioctl(fd, number::KVM_GET_STATS_FD()) };
    if file < 0 {
        return Err(errno::Error::last().into());
    }
    // SAFETY: the kernel gave this descriptor to us and to nobody else.
    Ok(unsafe { File::from_raw_fd(file) })
}

/// Reads header and descriptors.
fn describe(owner: &str, mut file: File) -> io::Result<Source> {
    let mut header = [0; size_of::<kvm_stats_header>()];
    file.read_exact(&mut header)?;
    let [_, name_size, count, _, descriptors, data] = words(&header);
    let size = size_of::<kvm_stats_desc>() + usize::try_from(name_size).unwrap_or(0);
    let mut bytes = vec![0; size * usize::try_from(count).unwrap_or(0)];
    file.read_exact_at(&mut bytes, descriptors.into())?;
    let fields = bytes
        .chunks_exact(size)
        .filter_map(|descriptor| field(owner, data, descriptor))
        .collect();
    Ok(Source { file, fields })
}

/// The first six 32-bit words.
fn words(bytes: &[u8]) -> [u32; 6] {
    let mut words = [0; 6];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    words
}

/// The field that a descriptor describes, if it is worth having: flags, exponent and number of
/// values, offset of the first, size of a histogram's buckets, name.
fn field(owner: &str, data: u32, descriptor: &[u8]) -> Option<Field> {
    let (head, name) = descriptor.split_at_checked(size_of::<kvm_stats_desc>())?;
    let name = name.split(|byte| *byte == 0).next()?;
    let name = std::str::from_utf8(name).ok()?;
    let [flags, exponent_and_values, offset, ..] = words(head);
    let kind = match flags & KVM_STATS_TYPE_MASK {
        KVM_STATS_TYPE_CUMULATIVE => StatisticKind::Cumulative,
        KVM_STATS_TYPE_INSTANT => StatisticKind::Instant,
        _ => return None,
    };
    (is_wanted(name) && exponent_and_values >> 16 == 1).then(|| Field {
        name: format!("{owner}.{name}"),
        kind,
        offset: u64::from(data) + u64::from(offset),
    })
}

/// Faults, mappings, invalidations and exits.
fn is_wanted(name: &str) -> bool {
    ["pf_", "pages_", "mmu_", "nx_lpage"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
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
    fn a_field_is_told_by_its_descriptor() {
        let taken = field(
            "vcpu",
            0x100,
            &descriptor(KVM_STATS_TYPE_CUMULATIVE, 1, 8, "pf_taken"),
        );
        let pages = field(
            "vm",
            0x80,
            &descriptor(KVM_STATS_TYPE_INSTANT, 1, 16, "pages_2m"),
        );

        let expected = |name: &str, kind, offset| {
            Some(Field {
                name: name.to_owned(),
                kind,
                offset,
            })
        };
        assert_eq!(
            taken,
            expected("vcpu.pf_taken", StatisticKind::Cumulative, 0x108)
        );
        assert_eq!(pages, expected("vm.pages_2m", StatisticKind::Instant, 0x90));
    }

    #[test]
    fn histograms_and_what_is_no_fault_are_left_out() {
        let histogram = descriptor(KVM_STATS_TYPE_CUMULATIVE, 32, 0, "pf_hist");
        let other = descriptor(KVM_STATS_TYPE_CUMULATIVE, 1, 0, "halt_wakeup");
        let peak = descriptor(2, 1, 0, "pages_peak");

        for bytes in [histogram, other, peak] {
            assert_eq!(field("vcpu", 0, &bytes), None);
        }
        assert_eq!(field("vcpu", 0, &[0; 3]), None);
    }

    /// Statistics with these values, in order.
    fn statistics(values: &[(&str, StatisticKind, u64)]) -> Statistics {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.2.to_le_bytes()).collect();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        let field = |(index, (name, kind, _)): (usize, &(&str, StatisticKind, u64))| Field {
            name: (*name).to_owned(),
            kind: *kind,
            offset: index as u64 * 8,
        };
        let fields = values.iter().enumerate().map(field).collect();
        Statistics {
            sources: vec![Source { file, fields }],
        }
    }

    fn names(statistics: &Statistics) -> Vec<String> {
        [StatisticKind::Cumulative, StatisticKind::Instant]
            .into_iter()
            .flat_map(|kind| statistics.read(kind).unwrap().into_keys())
            .collect()
    }

    #[test]
    fn what_a_kvm_offers_and_does_not_count_is_absent() {
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

        none.leave_out_uncounted().unwrap();
        some.leave_out_uncounted().unwrap();

        assert_eq!(names(&none), ["vcpu.exits"]);
        assert_eq!(names(&some), all);
    }

    #[test]
    fn no_statistics_are_absent_and_not_zero() {
        assert!(
            Statistics::none()
                .read(StatisticKind::Cumulative)
                .unwrap()
                .is_empty()
        );
    }
}
