package replica

import "strconv"

// ID names one life of a replica: the address it is reached at and the start of its process. A replica that restarts at
// the same address is another ID, so nothing recorded of its earlier life, whose KV cache is gone, is ever matched again.
// It is comparable and fit for a map key.
type ID struct {
	// Addr is the replica's base URL in canonical form: scheme, host and port, no trailing slash.
	Addr string
	// Start is the engine's process_start_time_seconds in microseconds; 0 while unknown.
	Start int64
}

// String returns address and start in a form for logs, such as "http://10.0.0.1:8000@1796088447620000".
func (id ID) String() string {
	if id.Start == 0 {
		return id.Addr
	}
	return id.Addr + "@" + strconv.FormatInt(id.Start, 10)
}
