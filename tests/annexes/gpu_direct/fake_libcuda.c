/* A libcuda.so.1 whose device memory is host memory: only the calls that kvikio makes. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
typedef int R; typedef unsigned long long P;
static uintptr_t lo[64], hi[64]; static int n; static long nsync0;
/* the test's own doors */
void* fake_device_alloc(size_t s){ void*p=0; if(posix_memalign(&p,4096,s)) return 0; lo[n]=(uintptr_t)p; hi[n++]=(uintptr_t)p+s; return p; }
long fake_null_stream_syncs(void){ return nsync0; }
static int dev(P p){ for(int i=0;i<n;i++) if(p>=lo[i]&&p<hi[i]) return i; return -1; }
R cuDriverGetVersion(int*v){ *v=12000; return 0; }
R cuMemHostAlloc(void**p,size_t s,unsigned f){ return posix_memalign(p,4096,s)?2:0; }
R cuMemFreeHost(void*p){ free(p); return 0; }
R cuMemHostRegister_v2(void*p,size_t s,unsigned f){ return 0; }
R cuMemHostUnregister(void*p){ return 0; }
R cuMemcpyHtoDAsync_v2(P d,const void*s,size_t k,void*st){ memcpy((void*)d,s,k); return 0; }
R cuMemcpyDtoHAsync_v2(void*d,P s,size_t k,void*st){ memcpy(d,(void*)s,k); return 0; }
R cuMemcpyAsync(P d,P s,size_t k,void*st){ memcpy((void*)d,(void*)s,k); return 0; }
R cuPointerGetAttribute(void*out,int a,P p){ int i=dev(p); if(a==1){*(void**)out=i<0?0:(void*)0x1000;} else if(a==2){*(unsigned*)out=i<0?1:2;} else *(unsigned*)out=0; return 0; }
R cuPointerGetAttributes(unsigned k,int*a,void**out,P p){ for(unsigned j=0;j<k;j++){ if(a[j]==2) *(unsigned*)out[j]=dev(p)<0?1:2; else if(a[j]==1) *(void**)out[j]=dev(p)<0?0:(void*)0x1000; else if(a[j]==3) *(P*)out[j]=p; else *(unsigned*)out[j]=0; } return 0; }
R cuMemGetAddressRange_v2(P*b,size_t*s,P p){ int i=dev(p); if(i<0) return 1; if(b)*b=lo[i]; if(s)*s=hi[i]-lo[i]; return 0; }
R cuCtxCreate_v2(void**c,unsigned f,int d){*c=(void*)0x1000;return 0;} R cuCtxDestroy_v2(void*c){return 0;}
R cuCtxCreate_v4(void**c,void*x,unsigned f,int d){*c=(void*)0x1000;return 0;}
R cuCtxPushCurrent_v2(void*c){return 0;} R cuCtxPopCurrent_v2(void**c){ if(c)*c=(void*)0x1000; return 0;} R cuCtxGetCurrent(void**c){*c=(void*)0x1000;return 0;} R cuCtxGetDevice(int*d){*d=0;return 0;}
R cuGetErrorName(R e,const char**s){*s="FAKE";return 0;} R cuGetErrorString(R e,const char**s){*s="fake";return 0;}
R cuDeviceGet(int*d,int o){*d=0;return 0;} R cuDeviceGetCount(int*c){*c=1;return 0;} R cuDeviceGetAttribute(int*v,int a,int d){*v=0;return 0;}
R cuDevicePrimaryCtxRetain(void**c,int d){*c=(void*)0x1000;return 0;} R cuDevicePrimaryCtxRelease_v2(int d){return 0;}
R cuStreamSynchronize(void*s){ if(!s) nsync0++; return 0;} R cuStreamCreate(void**s,unsigned f){*s=(void*)0x2000;return 0;} R cuStreamDestroy_v2(void*s){return 0;}
R cuEventSynchronize(void*e){return 0;} R cuEventCreate(void**e,unsigned f){*e=(void*)0x3000;return 0;} R cuEventDestroy_v2(void*e){return 0;} R cuEventRecord(void*e,void*s){return 0;} R cuEventQuery(void*e){return 0;}
R cuLaunchHostFunc(void*s,void(*f)(void*),void*u){ f(u); return 0; }
