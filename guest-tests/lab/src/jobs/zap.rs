// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Jobs of `granule lab zap`: one boot for each order of the folios and each system call.

use granule_types::units::Bytes;

use crate::{
    host::zap::Zap,
    jobs::{
        planned_job::{Host, HugePagePools, PlannedJob, host_memory},
        work::Work,
    },
    options::ZapMatrix,
};

/// Returns a job for each order and each call.
pub fn jobs(host: Host<'_>, matrix: &ZapMatrix) -> Vec<PlannedJob> {
    let size = Bytes(matrix.size.0.next_multiple_of(host.page_size.huge_page().0));
    let mut jobs = Vec::new();
    for order in matrix.orders(host.page_size) {
        jobs.extend(matrix.call.iter().map(|&call| job(host, Zap { size, order, call })));
    }
    jobs
}

fn job(host: Host<'_>, zap: Zap) -> PlannedJob {
    let name = format!("{}-{}-order-{}", zap.call, zap.size, zap.order);
    let pools = HugePagePools::new();
    let memory = host_memory(zap.size, &pools);
    let work = (Work::Zap(zap), Vec::new());
    let mut planned = PlannedJob::new(host, name, (1, memory), work, pools);
    planned.machine.omit_turns_of_one_cpu();
    planned
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        host::zap::ZapCall,
        jobs::matrix::{self, tests::options},
        values::PageSize,
    };

    #[test]
    fn each_order_and_call_is_one_boot() {
        let options = options("zap --size 256M --order 0,9 --call dontneed,dontneed-page");

        let jobs = matrix::jobs(&options, PageSize::Kib4, &[]);

        let names: Vec<_> = jobs.iter().map(|job| job.name.as_str()).collect();
        let expected = [
            "dontneed-256M-order-0",
            "dontneed-page-256M-order-0",
            "dontneed-256M-order-9",
            "dontneed-page-256M-order-9",
        ];
        assert_eq!(names, expected);
        let (call, size) = (ZapCall::DontneedPage, Bytes::mib(256));
        assert_eq!(jobs[3].work, Work::Zap(Zap { call, order: 9, size }));
        assert_eq!((jobs[3].machine.cpus, jobs[3].machine.quantum), (1, None));
    }

    #[test]
    fn the_default_orders_follow_the_page_size() {
        let orders = |page_size| {
            let jobs = matrix::jobs(&options("zap --call munmap"), page_size, &[]);
            let order = |job: &PlannedJob| job.name.rsplit('-').next().unwrap().to_owned();
            jobs.iter().map(order).collect::<Vec<_>>()
        };

        assert_eq!(orders(PageSize::Kib4), ["0", "9"]);
        assert_eq!(orders(PageSize::Kib64), ["0", "13"]);
    }
}
