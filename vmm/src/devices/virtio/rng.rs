// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Entropy for the guest (virtio 1.2, section 5.4), from the host kernel's generator.

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::{ConfigSpace, DeviceError, Direction, Queues, VirtioDevice};

/// Bytes given for one request at most, whatever it has room for.
const MOST: usize = 4096;

/// The device.
#[derive(Debug)]
pub struct Rng {
    config: ConfigSpace,
}

impl Default for Rng {
    fn default() -> Self {
        Self {
            config: ConfigSpace::new(Vec::new(), 0..0),
        }
    }
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[64]
    }

    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn process_queue(&mut self, queue: usize, queues: &mut Queues) -> Result<(), DeviceError> {
        let Some(ring) = queues.get(queue) else {
            return Ok(());
        };
        ring.drain(|memory, chain| {
            let mut bytes = [0; MOST];
            let wanted = chain.length(Direction::Writable).min(MOST);
            let mut done = 0;
            while done < wanted {
                match getrandom(&mut bytes[done..wanted], GetRandomFlags::empty()) {
                    Ok(count) => done += count,
                    Err(rustix::io::Errno::INTR) => {}
                    Err(error) => {
                        return Err(DeviceError::Host {
                            doing: "getting random numbers",
                            source: error.into(),
                        });
                    }
                }
            }
            let written = chain.copy_in(memory, 0, &bytes[..wanted]);
            Ok(u32::try_from(written).unwrap_or(0))
        })
    }
}
