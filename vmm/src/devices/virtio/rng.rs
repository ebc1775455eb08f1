// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Entropy device (virtio 1.2, section 5.4), from the generator of the host's kernel.

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::{ConfigSpace, DeviceError, Direction, Queues, VirtioDevice};

/// Maximum number of bytes per request, whatever its buffers have space for.
const MAX_BYTES: usize = 4096;

/// Entropy device.
#[derive(Debug)]
pub struct Rng {
    config: ConfigSpace,
}

impl Default for Rng {
    fn default() -> Self {
        Self { config: ConfigSpace::new(Vec::new(), 0..0) }
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

    fn process_queue(&mut self, index: usize, queues: &mut Queues) -> Result<(), DeviceError> {
        let Some(queue) = queues.get(index) else {
            return Ok(());
        };
        queue.serve_available(|memory, chain| {
            let mut bytes = [0; MAX_BYTES];
            let wanted = chain.length(Direction::Writable).min(MAX_BYTES);
            let mut done = 0;
            while done < wanted {
                let rest = &mut bytes[done..wanted];
                done +=
                    rustix::io::retry_on_intr(|| getrandom(&mut *rest, GetRandomFlags::empty()))
                        .map_err(DeviceError::host("reading random numbers (getrandom)"))?;
            }
            Ok(chain.write(memory, 0, &bytes[..wanted]))
        })
    }
}
