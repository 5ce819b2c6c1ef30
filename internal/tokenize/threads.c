#include <stdlib.h>

/* fastokens reads this once and then spreads every long text over its own threads, one for each processor. Here the pool's
 * threads are all there are, so that a long prompt leaves the other processors to the gateway. It is set before main, while
 * there is one thread: the environment must not change later. An operator's own setting counts. */
__attribute__((constructor)) static void prefixgate_one_thread(void) {
  setenv("FASTOKENS_BPE_THREADS", "1", 0);
}
