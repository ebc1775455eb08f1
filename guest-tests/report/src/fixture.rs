// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results for tests.

use granule_types::{
    phase::Phase,
    record::{Host, Obtained, Record, RunConfig, SCHEMA, Series},
    units::{Bytes, Nanoseconds},
};

/// Returns `create` in 64M of 2M pages by 16 vCPUs, on an emulated 5.10 without a series.
pub fn record() -> Record {
    Record {
        schema: SCHEMA.to_owned(),
        host: Host {
            arch: "aarch64".to_owned(),
            kernel: "5.10.262".to_owned(),
            series: Some(vec![]),
            image_sha256: Some("0a1b2c3d4e5f60718293a4b5c6d7e8f9".repeat(2)),
            cpu: Some("neoverse-n1".to_owned()),
            features: [("fwb".to_owned(), 0), ("dic".to_owned(), 0)].into(),
            page_size: Some(Bytes::kib(4)),
            emulator: Some("QEMU 7.2.22 -icount shift=0,sleep=off".to_owned()),
        },
        engine: "kvm".to_owned(),
        config: RunConfig {
            mode: "PA-bits:48,  VA-bits:48,  4K pages".to_owned(),
            backing: "anonymous_hugetlb_2mb".parse().unwrap(),
            memory: Bytes::mib(64),
            vcpus: 16,
            seed: 0,
            iteration: 0,
            prefault: false,
            options: Default::default(),
        },
        obtained: Some(Obtained { resident: [(2 << 20, 64 << 20)].into() }),
        phase: Phase::Create,
        round: None,
        ns: Nanoseconds(42_209_280),
        vcpu_ns: vec![],
        counters: [
            ("DC CIVAC".to_owned(), 34_625_989),
            ("TLBI VMALLS12E1IS".to_owned(), 33),
            ("IC IVAU".to_owned(), 0),
        ]
        .into(),
        events: [("kvm_guest_fault".to_owned(), 132_847)].into(),
        gauges: Default::default(),
    }
}

/// Returns [`record`] in two phases with a seed for each time, in microseconds.
pub fn runs(create: &[u64], update: &[u64]) -> Vec<Record> {
    let run = |phase, seed: usize, us: u64| {
        let mut record = record();
        record.phase = phase;
        record.config.seed = seed as u64;
        record.ns = Nanoseconds(us * 1000);
        record.counters.insert("DC CIVAC".to_owned(), us * 800);
        record
    };
    let of = |phase, times: &[u64]| -> Vec<Record> {
        let runs = times.iter().enumerate();
        runs.map(|(seed, &us)| run(phase, seed, us)).collect()
    };
    [of(Phase::Create, create), of(Phase::Update, update)].concat()
}

/// Returns the records as of the kernel with the series.
pub fn patched(mut records: Vec<Record>) -> Vec<Record> {
    for record in &mut records {
        record.host.kernel = "5.10.262-granule".to_owned();
        record.host.image_sha256 = Some("f".repeat(64));
        record.host.series =
            Some(vec![Series { name: "stage2-fault-path".to_owned(), patches: 6 }]);
    }
    records
}
