// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Builds a machine for Linux on arm64, up to vCPUs that stand at the kernel's entry.
//!
//! First everything that can be refused without a VM (images, memory), then the VM with the
//! smallest address width that will do, its slots, vCPUs and interrupt controller, then devices, and
//! at last, as it describes all of these, the device tree.

use std::{io::Read, path::PathBuf, sync::Arc};

use granule_types::units::Bytes;
use kvm_ioctls::Kvm;
use parking_lot::Mutex;
use thiserror::Error;
use vm_memory::Bytes as _;

pub use super::gic::Controller;
use super::{
    boot::{
        fdt::{Fdt, FdtError},
        image::{self, Image, ImageError},
        layout::{BootLayout, BootLayoutError},
    },
    eager_split::{self, EagerSplitError},
    gic::{self, GicError},
    ipa,
    vcpu::{self, VcpuFeatures},
    vm as arch_vm,
};
use crate::{
    devices::{BootTimer, MmioDeviceInfo, Pl011, REGISTER_SPACE, Rtc, Serial, serial},
    kvm::{self, dirty::DirtyMode, dirty_ring::DirtyRings, memslot::Memslot, stats::Statistics},
    memory::GuestRam,
    vm::{
        attach::attach,
        build::{BuildError, Ends, Machine},
        config::{Console, VmConfig},
        memory_zones,
        open_files::{Bootable, Opened},
        platform::{INTERRUPTS, Platform},
        vcpu::{Brake, Crew},
    },
};

/// What only an arm64 guest needs and does not get.
#[derive(Debug, Error)]
pub enum GuestError {
    /// The kernel cannot be started.
    #[error("--kernel {path}", path = path.display())]
    Kernel {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: ImageError,
    },
    /// It has no place in memory.
    #[error(transparent)]
    Room(#[from] BootLayoutError),
    /// There is no interrupt controller.
    #[error(transparent)]
    Gic(#[from] GicError),
    /// Blocks cannot be split ahead.
    #[error(transparent)]
    Split(#[from] EagerSplitError),
    /// There is no device tree.
    #[error(transparent)]
    Fdt(#[from] FdtError),
}

/// Whether there are Linux guests for this architecture: yes.
///
/// # Errors
/// None.
pub const fn check() -> Result<(), GuestError> {
    Ok(())
}

/// Builds a machine; its vCPUs stand still.
///
/// # Errors
/// What was asked for cannot be had; the error says what, and what to do.
pub fn build(config: &VmConfig, opened: &Opened, ends: Ends) -> Result<Machine, BuildError> {
    let kvm = &opened.kvm;
    kvm::check_vcpus(kvm, config.vcpus)?;
    let image = read_image(&opened.kernel)?;
    let initrd = opened.initrd.as_ref();
    let initrd_size = initrd
        .map(|initrd| initrd.read(|file| Ok(Bytes(file.metadata()?.len()))))
        .transpose()?;
    let memory = memory_zones::obtain(&config.memory)?;
    let first = memory.zones.first().map_or(Bytes(0), |ram| ram.size());
    let places = BootLayout::new(&image, initrd_size, first).map_err(GuestError::from)?;
    let end = memory
        .zones
        .last()
        .map_or(0, |ram| ram.start().0 + ram.size().0);
    let ipa_bits = arch_vm::choose_ipa_bits(kvm, end, config.ipa_bits)?;
    let ipa_bits = match config.ipa_bits {
        Some(_) => ipa_bits,
        None => ipa_bits.max(bits_for_blocks(kvm, &memory.zones)),
    };

    let vm = Arc::new(arch_vm::create_vm(kvm, ipa_bits)?);
    let rings = (config.dirty == DirtyMode::Ring).then(|| DirtyRings::enable(&vm));
    let rings = rings.transpose()?.map(Arc::new);
    if let Some(chunk) = config.eager_split {
        eager_split::enable(&vm, chunk).map_err(GuestError::from)?;
    }
    vcpu::report_undecoded(&vm);
    let slots = (0..)
        .zip(&memory.zones)
        .map(|(number, ram)| Memslot::new(&vm, number, Arc::clone(ram)))
        .collect::<Result<Vec<_>, _>>()?;
    let features = VcpuFeatures::of_host(&vm);
    let vcpus = (0..config.vcpus)
        .map(|index| vcpu::make_vcpu(&vm, index, features))
        .collect::<Result<Vec<_>, _>>()?;
    if let Some(rings) = &rings {
        vcpus.iter().try_for_each(|vcpu| rings.add(vcpu))?;
    }
    let controller = gic::make(&vm, config.vcpus.into(), INTERRUPTS).map_err(GuestError::from)?;
    if features.pmu {
        vcpus.iter().try_for_each(vcpu::start_pmu)?;
    }

    let mut platform = Platform::new(&vm);
    let console = platform.place()?;
    let (number, event) = platform.interrupt()?;
    let serial: Arc<Mutex<dyn serial::SerialPort>> = match config.console {
        Console::Ns16550a => {
            let serial = Arc::new(Mutex::new(Serial::new(event, ends.output)));
            platform.add(Serial::describe(console, number), Arc::clone(&serial) as _)?;
            serial
        }
        Console::Pl011 => {
            let serial = Arc::new(Mutex::new(Pl011::new(event, ends.output)));
            platform.add(Pl011::describe(console, number), Arc::clone(&serial) as _)?;
            serial
        }
    };
    let clock = Rtc::describe(platform.place()?);
    platform.add(clock, Arc::new(Mutex::new(Rtc::new())))?;
    let timer = BootTimer::describe(platform.place()?);
    let boot_timer = BootTimer::new(ends.started, ends.tell);
    platform.add(timer, Arc::new(Mutex::new(boot_timer)))?;
    let balloon = attach(
        &mut platform,
        &config.devices,
        opened,
        ends.console,
        &Arc::new(memory.map.clone()),
    )?;
    let bus = Arc::new(platform.finish());

    let mut statistics = Statistics::none();
    if ends.statistics {
        statistics.add_vm(&vm);
        vcpus.iter().for_each(|vcpu| statistics.add_vcpu(vcpu));
    }
    let affinities = vcpus
        .iter()
        .map(vcpu::affinity)
        .collect::<Result<Vec<_>, _>>()?;
    let pieces: Vec<_> = memory
        .zones
        .iter()
        .map(|ram| (ram.start(), ram.size()))
        .collect();
    let devices: Vec<MmioDeviceInfo> = bus.infos().cloned().collect();
    let seed = seed();
    let tree = Fdt {
        memory: &pieces,
        cpus: &affinities,
        pmu: features.pmu,
        gic: &controller.description,
        devices: &devices,
        command_line: &config.command_line,
        initrd: places.initrd.clone(),
        seed: seed.as_ref().map(<[u8; SEED]>::as_slice),
    };
    let copy = |what: &'static str| move |source| BuildError::Copy { what, source };
    let map = memory.map.map();
    map.write_slice(&tree.write().map_err(GuestError::from)?, places.tree)
        .map_err(copy("the device tree"))?;
    map.write_slice(&image.bytes, places.kernel)
        .map_err(copy("the kernel"))?;
    if let (Some(initrd), Some(range)) = (initrd, &places.initrd) {
        let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let start = vm_memory::GuestAddress(range.start);
        initrd
            .read(|mut file| Ok(map.read_exact_volatile_from(start, &mut file, length)))?
            .map_err(copy("the initramfs"))?;
    }
    if let Some(first) = vcpus.first() {
        vcpu::start_at(first, places.kernel.0, places.tree.0)?;
    }
    let crew = Crew::start(
        vcpus,
        Arc::clone(&bus),
        rings.clone(),
        Some(Brake {
            port: console.0..console.0 + REGISTER_SPACE,
            outlet: ends.outlet,
        }),
        ends.ended,
        &ends.prepare,
    )
    .map_err(BuildError::Threads)?;
    Ok(Machine {
        crew,
        serial,
        balloon,
        bus,
        rings,
        slots,
        _controller: controller,
        vm,
        ipa_bits,
        memory,
        statistics,
    })
}

/// The width that blocks of the zones' pages take, as far as this host gives it.
fn bits_for_blocks(kvm: &Kvm, zones: &[Arc<GuestRam>]) -> u8 {
    let width = |ram: &Arc<GuestRam>| ipa::for_blocks(ram.plan().page(), ram.plan().base_page());
    let widths = zones.iter().map(width);
    widths
        .max()
        .unwrap_or(0)
        .min(ipa::limit(kvm.get_host_ipa_limit()))
}

fn read_image(kernel: &Bootable) -> Result<Image, BuildError> {
    let bytes = kernel.read(|file| {
        let mut bytes = Vec::new();
        // One byte more than the largest, so that what is larger is seen to be.
        file.take(image::LARGEST.0 + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    })?;
    let image = Image::from_file(bytes).map_err(|source| GuestError::Kernel {
        path: kernel.path().to_owned(),
        source,
    })?;
    Ok(image)
}

/// Bytes of a seed: 8 for KASLR, the rest for the guest's random numbers.
const SEED: usize = 8 + 64;

/// Random bytes, if the host has any yet: a host that has just started may wait long for them.
fn seed() -> Option<[u8; SEED]> {
    use rustix::rand::{GetRandomFlags, getrandom};
    let mut seed = [0; SEED];
    let filled = getrandom(&mut seed, GetRandomFlags::NONBLOCK).ok()?;
    (filled == SEED).then_some(seed)
}
